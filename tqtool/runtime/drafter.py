"""A trunk with its multi-token-prediction companion: loaded together or not at all, and what they draft.

The companion has no embedding and no head of its own: it reads its trunk's, and its trunk's hidden states. So both must
lie in one basis, which is checked by what their manifests say. mlx is imported inside the functions, as in ``load``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqtool.artifact.reader import read_manifest
from tqtool.errors import ArtifactError, UserError
from tqtool.formats.manifest import MANIFEST_NAME, rotation_seeds
from tqtool.runtime.blas import ensure_blas
from tqtool.runtime.load import LoadedModel
from tqtool.source.checkpoint import open_checkpoint
from tqtool.source.config import text_config

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

    from tqtool.runtime.draft_head import DraftHead

FOLDER = "mtp"
MODEL_TYPE = "qwen3_5_mtp"
DEPTH_KEY = "mtp_num_hidden_layers"
TAPS = ("post_norm", "pre_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """A trunk and its draft head.

    Attributes:
        trunk: mlx-lm's text model: ``model.embed_tokens``, ``model.norm``, and ``lm_head`` if the head is its own.
        head: The draft head.
        tap: Where the hidden state is taken: behind the trunk's final norm, or before it.
    """

    trunk: nn.Module
    head: DraftHead
    tap: str

    def run(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Logits ``[B, T, vocab]`` of the trunk over ``tokens [B, T]``, and the hidden states ``[B, T, hidden]``."""
        from tqtool.runtime.draft_head import KeptInput

        inner = self.trunk.model
        norm = inner.norm
        inner.norm = tap = KeptInput(norm)
        try:
            normed = inner(tokens)
        finally:
            inner.norm = norm
        return self.logits(normed), normed if self.tap == "post_norm" else tap.kept[0]

    def logits(self, normed: mx.array) -> mx.array:
        """What the trunk's head makes of ``normed [B, T, hidden]``."""
        if "lm_head" in self.trunk:
            result: mx.array = self.trunk.lm_head(normed)
        else:
            result = self.trunk.model.embed_tokens.as_linear(normed)
        return result

    def draft_logits(self, tokens: mx.array) -> mx.array:
        """Logits ``[B, T - 1, vocab]`` of the first draft behind each position but the last of ``tokens [B, T]``.

        Row i has read token i + 1 and predicts token i + 2, as the trunk does in its row i + 1.
        """
        _, state = self.run(tokens)
        embedded = self.trunk.model.embed_tokens(tokens[:, 1:])
        return self.logits(self.head(embedded, state[:, :-1]).normed)


def load_drafter(loaded: LoadedModel, folder: Path | None = None) -> Drafter:
    """The companion of ``loaded``, in the type of its dense parameters.

    Args:
        loaded: The trunk, of any format.
        folder: Of the companion; None is ``mtp`` in the trunk's folder.

    Raises:
        UserError: There is none, it is of another architecture or size, or carries other rotations than the trunk.
        ArtifactError: It is damaged.
    """
    ensure_blas()
    trunk_folder = loaded.report.path
    folder = folder or trunk_folder / FOLDER
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}: no multi-token-prediction companion", hint="convert and trellis write one with --mtp 8"
        )
    opened = open_checkpoint(str(folder), allow_quantized=True)
    config = opened.config
    if opened.model_type != MODEL_TYPE:
        raise UserError(f"{folder}: model_type is {opened.model_type!r}, expected {MODEL_TYPE!r}")
    text, own = text_config(config), text_config(loaded.config)
    if text.get("hidden_size") != own.get("hidden_size"):
        raise UserError(
            f"{folder}: hidden_size is {text.get('hidden_size')}, its trunk's {own.get('hidden_size')}",
            hint="give the companion that was made with this trunk",
        )
    _require_same_basis(trunk_folder, folder)
    tap = config.get("hidden_tap", TAPS[0])
    if tap not in TAPS:
        raise ArtifactError(f"{folder}: config.json: hidden_tap: expected one of {', '.join(TAPS)}, found {tap!r}")
    head = _build(config, tap)
    _fill(folder, head, loaded.report.dtype)
    return Drafter(trunk=getattr(loaded.model, "language_model", loaded.model), head=head, tap=tap)


def _require_same_basis(trunk: Path, folder: Path) -> None:
    mine, own = (_seeds(each) for each in (trunk, folder))
    if mine != own:
        raise UserError(
            f"{folder}: carries rotations of seeds {list(own)}, its trunk {list(mine)}: what one writes the other "
            "cannot read",
            hint="give the companion that was made with this trunk",
        )


def _seeds(folder: Path) -> tuple[int | None, ...]:
    """Of the rotations that a folder's weights carry; none without a manifest."""
    return rotation_seeds(read_manifest(folder).transforms) if (folder / MANIFEST_NAME).is_file() else ()


def _build(config: Mapping[str, Any], tap: str) -> DraftHead:
    """The head with random weights, quantized modules in place."""
    import mlx.nn as nn

    from tqtool.runtime.draft_head import DraftHead

    text = dict(text_config(config))
    head = DraftHead(text, int(text.get(DEPTH_KEY, 1)), is_post_norm=tap == "post_norm")
    packed = config.get("quantization")
    if packed:
        top = {key: packed[key] for key in ("group_size", "bits")}

        def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
            entry: bool | dict[str, Any] = packed.get(path, top)
            return entry if hasattr(module, "to_quantized") else False

        nn.quantize(head, **top, class_predicate=choose)
    return head


def _fill(folder: Path, head: DraftHead, dtype: str | None) -> None:
    """Read its weights, in the names of mlx-vlm."""
    import mlx.core as mx

    weights: dict[str, Any] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found: Any = mx.load(str(file))
        weights.update(found)
    kind = None if dtype is None else getattr(mx, dtype)
    cast = {
        name: value if kind is None or not mx.issubdtype(value.dtype, mx.floating) else value.astype(kind)
        for name, value in weights.items()
    }
    try:
        head.load_weights(list(cast.items()), strict=True)
    except ValueError as error:
        raise ArtifactError(
            f"{folder}: {str(error).splitlines()[0]}", hint="tqtool verify says what is wrong"
        ) from error
    head.eval()
    mx.eval(head.parameters())
