"""Order and scale of an MLP's hidden channels, free at decode.

``down(silu(gate(x)) ∘ up(x))`` is the same function for any order of its channels, and for ``up[c,:]·s_c`` with
``down[:,c]/s_c``: rows of up have scales of their own anyway. Two things can be had for a down_proj coded in tiles, 16
channels of all outputs a step, of which the first is worth more (``docs/log.md``):

* columns of equal norm, so that the scale of a row fits all of its weights: ``s_c = ‖down[:,c]‖``. Where a column is
  far above the others this is no refinement: its weights leave the range of the code. Two columns of 4864, 11 and 17
  times the median, cost a down_proj of Qwen2.5-Coder-0.5B everything (``tame_outliers`` alone mends that);
* channels by falling curvature ``s_c²·H_cc``, so that those that matter most are coded first and corrected by all
  others. Inside a square nothing is corrected, so where a few channels make a massive activation this order spoils it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tqtool.transform.folds import Channels, FoldChannels, OnRows
from tqtool.transform.outputs import OutputTensor, Role, TransformPlan

MLPS = ({Role.GATE, Role.UP, Role.DOWN}, {Role.GATE_UP, Role.DOWN})
"""What an MLP with hidden channels consists of: gate and up apart, or as one projection."""
MLP_ROLES = set.union(*MLPS)
LARGEST_SCALE = 256.0
"""A channel is scaled by no more, up or down: rows of up_proj must keep scales that float16 holds to full precision."""


OUTLIER = 2.0
"""Columns longer than this many medians are shortened to it."""


def tame_outliers(norms: NDArray[np.floating]) -> Channels | None:
    """Scales that shorten outlier columns and touch no other, in the order there is; None where there are none.

    Args:
        norms: As for ``choose_channels``.
    """
    wide = norms.astype(np.float64)
    live = (wide > 0) & np.isfinite(wide)
    if not live.any():
        return None
    ratio = np.where(live, wide, 0.0) / (OUTLIER * np.median(wide[live]))
    scale = np.clip(ratio, 1.0, LARGEST_SCALE).astype(np.float32)
    if (scale == 1).all():
        return None
    return Channels(order=np.arange(len(scale), dtype=np.int32), scale=scale)


def choose_channels(norms: NDArray[np.floating], curvature: NDArray[np.floating]) -> Channels:
    """Order and scales of one MLP.

    Args:
        norms: Norm of each column of down_proj, ``[n]``; a column of zeros, or one that is not finite (the job refuses
            it later), keeps the scale 1.
        curvature: Diagonal of its Hessian, ``[n]``.
    """
    wide = norms.astype(np.float64)
    live = (wide > 0) & np.isfinite(wide)
    scale = np.ones_like(wide)
    if live.any():
        scale[live] = wide[live] / np.exp(np.log(wide[live]).mean())
    stored = np.clip(scale, 1 / LARGEST_SCALE, LARGEST_SCALE).astype(np.float32)
    order = np.argsort(-(curvature * np.square(stored, dtype=np.float64)), kind="stable")
    return Channels(order=order.astype(np.int32), scale=stored)


def mlps(plan: TransformPlan) -> dict[str, OutputTensor]:
    """``….mlp``, or ``….experts.3``, → its down_proj, for each MLP that has gate, up and down, apart or fused."""
    roles: dict[str, dict[Role, OutputTensor]] = {}
    for output in plan.pieces():
        if output.module is not None and output.role in MLP_ROLES:
            roles.setdefault(_parent(output.module), {})[output.role] = output
    return {path: found[Role.DOWN] for path, found in roles.items() if set(found) in MLPS}


def with_channels(plan: TransformPlan, channels: Mapping[str, Channels]) -> TransformPlan:
    """``plan`` with the MLPs named by ``channels`` reordered; each fold comes after those that are there."""
    roles = {piece.module: piece.role for piece in plan.pieces() if piece.module is not None}

    def fold(output: OutputTensor) -> OutputTensor:
        if output.parts:
            return replace(output, parts=tuple(fold(part) for part in output.parts))
        module = output.name.rsplit(".", 1)[0]
        mixed, role = channels.get(_parent(module)), roles.get(module)
        if mixed is None or role not in MLP_ROLES:
            return output
        if role is Role.GATE and mixed.is_in_order:
            return output
        if role is Role.GATE_UP:
            return replace(output, ops=(*output.ops, *_fused(mixed)))
        if role is not Role.DOWN:
            op = FoldChannels(channels=mixed, axis="output", is_scaled=role is Role.UP)
        elif output.module is not None:
            op = FoldChannels(channels=mixed, axis="input", is_scaled=True)
        else:
            return output  # down_proj's bias is no channel's
        return replace(output, ops=(*output.ops, op))

    return replace(plan, outputs=tuple(fold(output) for output in plan.outputs))


def _fused(channels: Channels) -> tuple[OnRows, ...]:
    """Folds of gate_up: both halves are reordered, that of up is scaled."""
    n = len(channels.order)
    gate, up = (FoldChannels(channels=channels, axis="output", is_scaled=is_up) for is_up in (False, True))
    moved = () if channels.is_in_order else (OnRows(start=0, stop=n, fold=gate),)
    return (*moved, OnRows(start=n, stop=2 * n, fold=up))


def _parent(module: str) -> str:
    return module.rpartition(".")[0]
