"""The search for paths, on the CPU or on a GPU: which of them, and why. All find the same states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tqtool import native
from tqtool.errors import BackendError, UserError
from tqtool.mathx import codes

if TYPE_CHECKING:
    from tqtool.kernels.encoder import Encoder

Device = Literal["cpu", "cuda", "metal"]
Backend = Literal["auto", "cuda", "metal", "cpu"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


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
        BackendError: the GPU that was asked for is not there, or its kernel does not do this trellis.
    """
    if asked == "cpu":
        return DeviceChoice("cpu")
    from tqtool.kernels.cuda import is_proven_here

    device: Device = "cuda" if asked == "auto" else asked
    if asked == "auto" and not is_proven_here():
        return DeviceChoice("cpu", "no card that the CUDA kernels have passed their tests on")
    if not is_present(device):
        raise BackendError(f"--backend {device}: this MLX has no such device", hint="--backend auto, or cpu")
    reason = _refusal(device, window=window, k=k, code=code, warmup=warmup)
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


def _refusal(device: Device, *, window: int, k: int, code: codes.Code, warmup: int | None) -> str | None:
    from tqtool.kernels.encoding import encode_problem

    problem = encode_problem(1, codes.levels(code, window), window=window, k=k, warmup=warmup)
    return gpu_encoder(device).supports(problem)
