"""The search for paths, on the CPU or on a GPU: which of them, and why. All find the same states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tqtool import native
from tqtool.errors import BackendError, UserError
from tqtool.formats.trellis import BLOCK
from tqtool.kernels.encoding import LEVEL_LIMIT, encode_problem
from tqtool.mathx import codes

if TYPE_CHECKING:
    from tqtool.kernels.encoder import Encoder

Device = Literal["cpu", "cuda", "metal"]
Backend = Literal["auto", "cuda", "metal", "cpu"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
TRIED = 16
"""Blocks that a GPU is tried on when a job is planned."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where paths are searched, and why not elsewhere (empty if nothing better was asked for)."""

    device: Device
    reason: str = ""


def parse_backend(text: str) -> Backend:
    """What ``--backend`` takes; UserError otherwise."""
    for backend in BACKENDS:
        if backend == text:
            return backend
    raise UserError(f"--backend {text!r}: expected {', '.join(BACKENDS)}")


def choose_device(asked: Backend, *, window: int, k: int, code: codes.Code, warmup: int | None) -> DeviceChoice:
    """The device for one trellis. ``auto`` takes a GPU only where its kernels have passed their tests on such a card.

    Raises:
        BackendError: the GPU that was asked for is not there, its kernel does not do this trellis, or does it wrongly.
    """
    if asked == "cpu":
        return DeviceChoice("cpu")
    from tqtool.kernels.cuda import is_search_proven_here

    device: Device = "cuda" if asked == "auto" else asked
    if asked == "auto" and not is_search_proven_here():
        return DeviceChoice("cpu", "no card that the CUDA search, as it stands, has passed its tests on")
    if not is_present(device):
        raise BackendError(f"--backend {device}: this MLX has no such device", hint="--backend auto, or cpu")
    reason = _refusal(device, window, k, code, warmup)
    if reason is None:
        return DeviceChoice(device)
    if asked == "auto":
        return DeviceChoice("cpu", f"{device}: {reason}")
    raise BackendError(f"--backend {device}: {reason}", hint="--backend auto searches such paths on the CPU")


def is_present(device: Device) -> bool:
    """Whether MLX has such a device here."""
    import mlx.core as mx

    return {"cpu": lambda: True, "cuda": mx.cuda.is_available, "metal": mx.metal.is_available}[device]()


def search(
    x: NDArray[np.int16],
    levels: NDArray[np.int16],
    *,
    window: int,
    k: int,
    warmup: int | None,
    device: Device,
    threads: int = 0,
) -> NDArray[np.uint16]:
    """States ``[n, 256]`` of the best tail-biting paths for inputs ``[n, 256]`` in level units.

    Raises:
        BackendError: shapes do not fit, or the device does not do this trellis.
    """
    if device == "cpu":
        return native.viterbi_encode(x, levels, window=window, k=k, warmup=warmup, threads=threads)[0]
    return gpu_encoder(device).viterbi_encode(x, levels, window=window, k=k, warmup=warmup)[0]


def gpu_encoder(device: Device) -> Encoder:
    """The encoder of a GPU; BackendError for the CPU, which has none."""
    if device == "cuda":
        from tqtool.kernels.cuda_encoder import CUDA_ENCODER

        return CUDA_ENCODER
    if device == "metal":
        from tqtool.kernels.metal_encoder import METAL_ENCODER

        return METAL_ENCODER
    raise BackendError(f"{device} is no GPU")


@lru_cache(maxsize=64)
def _refusal(device: Device, window: int, k: int, code: codes.Code, warmup: int | None) -> str | None:
    """Why the device does not do this trellis; a first few blocks are searched on the CPU too."""
    encoder, levels = gpu_encoder(device), codes.levels(code, window)
    reason = encoder.supports(encode_problem(1, levels, window=window, k=k, warmup=warmup))
    if reason is not None:
        return reason
    draw = np.random.default_rng(window + k).standard_normal((TRIED, BLOCK)) * codes.UNIT[code] * codes.CODE_SCALE[k]
    x = np.clip(np.rint(draw), -LEVEL_LIMIT, LEVEL_LIMIT).astype(np.int16)
    found, _ = encoder.viterbi_encode(x, levels, window=window, k=k, warmup=warmup)
    expected, _ = native.viterbi_encode(x, levels, window=window, k=k, warmup=warmup)
    if np.array_equal(found, expected):
        return None
    return f"of {TRIED} paths tried here {np.count_nonzero((found != expected).any(axis=1))} are not the CPU's"
