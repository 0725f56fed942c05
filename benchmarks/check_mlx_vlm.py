"""An artifact of qwen3_5 or qwen3_5_moe with ``--mtp`` in mlx-vlm: does it load, and are its logits ours?

    python benchmarks/check_mlx_vlm.py ARTIFACT [--plain FOLDER]

mlx-vlm is no dependency: install it into an environment of its own beside tqtool (``pip install mlx-vlm``). It loads
the folder and its ``mtp/`` by its own rules; printed are the largest differences of the trunk's and of the first
drafts' logits, and the shape of the tower's patch convolution; with ``--plain``, the same model written without a
rotation, what the tower makes of a random picture, against the plain tower's features times R1. Run on random weights
(``tests/support/tiny_hybrid``) or on a real model; everything in float32.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 40


def main() -> None:
    from tqtool.runtime.blas import ensure_blas

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--plain", type=Path, help="the same model, not rotated")
    options = parser.parse_args()
    folder = options.artifact
    ensure_blas()
    import mlx.core as mx

    from tqtool.runtime.drafter import load_drafter
    from tqtool.runtime.load import load

    loaded = load(folder, dtype="float32")
    drafter = load_drafter(loaded)
    vocab = int(drafter.trunk.model.embed_tokens.weight.shape[0])
    tokens = mx.array(np.random.default_rng(3).integers(3, vocab, (1, TOKENS)).astype(np.int32))
    ours, drafts = drafter.run(tokens)[0], drafter.draft_logits(tokens)
    trunk = _theirs(folder)
    found = trunk.language_model(tokens, cache=trunk.language_model.make_cache(), return_hidden=True)
    state = found.hidden_states[-1] if isinstance(found.hidden_states, list | tuple) else found.hidden_states
    print(f"trunk: {_difference(ours, found.logits)}")
    print(f"tower: patch convolution {list(trunk.vision_tower.patch_embed.proj.weight.shape)}")
    if options.plain is not None:
        features = _features(trunk), _turned(_features(_theirs(options.plain)), folder)
        worst = np.abs(features[0] - features[1]).max()
        print(f"tower: features differ by {worst:.1e} of {np.abs(features[1]).max():.1f} from the plain one's times R1")
    companion = _theirs(folder / "mtp")
    companion.reset(trunk)
    normed = companion._forward_tokens(tokens[:, 1:], state[:, :-1], mx.int32)
    print(f"drafts: {_difference(drafts, companion._lm_head_fn(normed))}")


def _theirs(folder: Path) -> Any:
    """mlx-vlm's model of ``folder`` in float32."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_vlm.utils import load_model

    def widened(array: Any) -> Any:
        return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array

    model = load_model(folder)
    model.update(tree_map(widened, model.parameters()))
    return model


def _features(model: Any) -> Any:
    """What the tower writes into the residual stream for one random picture of 4 × 4 patches, ``[tokens, hidden]``."""
    import mlx.core as mx

    vision = model.config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = mx.array(np.random.default_rng(0).standard_normal((16, width)).astype(np.float32))
    found = model.vision_tower(pixels, mx.array([[1, 4, 4]]))
    return np.array((found[0] if isinstance(found, tuple) else found).astype(mx.float32), np.float64)


def _turned(features: Any, folder: Path) -> Any:
    """``features`` in the basis of the artifact."""
    from tqtool.artifact.reader import read_manifest
    from tqtool.formats.manifest import rotation_seeds
    from tqtool.mathx.signs import sign_vector
    from tqtool.native import hadamard_transform

    for seed in rotation_seeds(read_manifest(folder).transforms):
        n = features.shape[-1]
        signs = sign_vector(int(seed or 0), n, lane=0).astype(np.float64)
        features = hadamard_transform(np.ascontiguousarray(features), axis=1, block=n, scale=signs)
    return features


def _difference(ours: Any, theirs: Any) -> str:
    import mlx.core as mx

    mine, own = (np.array(logits.astype(mx.float32))[0] for logits in (ours, theirs))
    same = float((mine.argmax(axis=-1) == own.argmax(axis=-1)).mean())
    return f"largest difference {np.abs(mine - own).max():.1e} of {np.abs(own).max():.1f}, argmax equal in {same:.0%}"


if __name__ == "__main__":
    main()
