"""Which kernels a device gets: tqtool's own runtime and the model file that artifacts ship ask the same question."""

from __future__ import annotations

import os

import mlx.core as mx

from tqtool.errors import UserError
from tqtool.kernels.backend import Backend
from tqtool.kernels.metal_kernels import METAL_SWITCH


def backend_of(device: mx.Device) -> Backend | None:
    """The kernels for trellis layers on ``device``, or None where MLX operations do their work.

    CUDA kernels on cards of the generation that they ran on; Metal kernels where ``METAL_SWITCH`` asks for them.

    Raises:
        UserError: the switch is neither 0 nor 1.
    """
    if device.type == mx.cpu:
        return None
    if mx.cuda.is_available():
        from tqtool.kernels.cuda import CUDA, is_proven_here

        return CUDA if is_proven_here() else None
    if mx.metal.is_available() and is_metal_asked_for():
        from tqtool.kernels.metal import METAL

        return METAL
    return None


def is_metal_asked_for() -> bool:
    """Whether the environment asks for Metal kernels; UserError if it says neither yes nor no."""
    value = os.environ.get(METAL_SWITCH, "0")
    if value not in ("", "0", "1"):
        raise UserError(f"{METAL_SWITCH}={value}: expected 1 (run the Metal kernels) or 0")
    return value == "1"
