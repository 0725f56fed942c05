"""Drafts of a companion, folded against source: in float64, and of what was written as our runtime makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracles import decoder, delta_net, draft_head
from tests.support.tiny_hybrid import VOCAB, companion_of, flat_config, tensors_of
from tqtool.runtime.drafter import load_drafter
from tqtool.runtime.load import load
from tqtool.transform.apply import apply_folds
from tqtool.transform.companion import CompanionSource, Tap, plan_companion
from tqtool.transform.families import FAMILIES
from tqtool.transform.plan import plan_rotation

TOKENS = np.array([int(token) for token in np.random.default_rng(3).integers(3, VOCAB, 40)])

Logits = NDArray[np.float64]


def drafts(folder: Path, **options: Any) -> Logits:
    """Logits of the first draft behind every position but the last."""
    import mlx.core as mx

    drafter = load_drafter(load(folder, **options))
    return np.array(drafter.draft_logits(mx.array(TOKENS)[None])[0].astype(mx.float32), np.float64)


def expected(source: Path, tap: str, *, is_folded: bool) -> Logits:
    """The same in float64 of the source; ``is_folded``: with the two things in place that a fold cannot keep."""
    config, head = flat_config(source), draft_head.plain(companion_of(source))
    trunk = delta_net.plain(_trunk64(source), config)
    final, gain = trunk["model.norm.weight"], None
    if is_folded:
        head["norm.weight"] = final
        gain = final / np.sqrt(np.mean(final**2)) if tap == "post_norm" else None
    return _drafts64(config, trunk, head, tap, gain)


def exact_error(source: Path, tap: Tap, *, seed: int = 42) -> float:
    """Largest difference of float64 drafts, folded against source, over the largest logit."""
    config = json.loads((source / "config.json").read_text())
    trunk, head = _trunk64(source), companion_of(source)
    shapes = {name: array.shape for name, array in trunk.items()}
    found = CompanionSource(shapes={name: array.shape for name, array in head.items()}, gain_offset=1.0)
    whole = plan_rotation(shapes, config, seed=seed)
    inside = plan_companion(FAMILIES[config["model_type"]], shapes, config, found, seed=seed, tap=tap)
    tensors = {**trunk, **head}
    folded, drafter = (
        {piece.name: apply_folds(piece, tensors.__getitem__, dtype=np.float64) for piece in plan.pieces()}
        for plan in (whole, inside)
    )
    flat = flat_config(source)
    result = _drafts64(flat, delta_net.plain(folded, flat), drafter, tap, None)
    truth = expected(source, tap, is_folded=True)
    return float(np.abs(result - truth).max() / np.abs(truth).max())


def _trunk64(source: Path) -> decoder.Weights:
    return {k: v.astype(np.float64) for k, v in tensors_of(source).items() if not k.startswith("mtp.")}


def _drafts64(
    config: dict[str, Any], trunk: decoder.Weights, head: decoder.Weights, tap: str, gain: Logits | None
) -> Logits:
    """Of plain weights; with ``gain`` the state is normalized without one and multiplied by it behind its norm."""
    state = decoder.residual(trunk, config, TOKENS)
    final = trunk["model.norm.weight"]
    if tap == "post_norm":
        state = decoder.rms_norm(state, final if gain is None else np.ones_like(final), config)
    embedded = trunk["model.embed_tokens.weight"][TOKENS[1:]]
    normed, _ = draft_head.forward(head, config, embedded, state[:-1], state_gain=gain)
    return normed @ decoder.head(trunk, config).T
