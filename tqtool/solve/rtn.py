"""Round to nearest: float tensors cast and stored, or packed with the bytes of ``mx.quantize``, in row chunks.

Groups never cross a row, so rows are independent; chunks bound the memory. Scales and biases of the affine mode take
the dtype of the weight that MLX sees, so the weight is rounded to ``dtype`` (half to even) before it is packed.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tqtool import native
from tqtool.errors import NumericalError, UserError
from tqtool.formats.affine import AffineSpec, Mode
from tqtool.formats.dtypes import DType
from tqtool.solve.quantizer import ConfigEntry, QuantResult, ReadRows, StoredTensor, module_of

if TYPE_CHECKING:
    import mlx.core as mx

Chunks = Iterable[tuple[int, NDArray[Any]]]
"""First row and values ``[rows, in]`` in the model's dtype, in order."""

CHUNK_ELEMENTS = 1 << 20
"""Elements packed by one call: 2 MB of bf16 stays in cache and hides the launch."""

PENDING_CHUNKS = 2
"""Chunks queued per MLX stream, so that none idles while the next one is read."""

MAX_STREAMS = 8

NVFP4_ERROR = 0.01
"""Relative squared error of nvfp4 on Gaussian weights: what vanishes with its scales may not add more than that."""


_SHORT = {DType.BF16: "bf16", DType.F16: "f16", DType.F32: "f32", DType.F64: "f64"}


def cast(name: str, values: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Round to ``dtype`` half to even; a finite value that becomes infinite is a NumericalError."""
    if values.dtype == dtype.numpy:
        return values
    with np.errstate(over="ignore"):
        stored = values.astype(dtype.numpy)
    if dtype is DType.F16 and not np.isfinite(stored).all():
        worst = float(np.abs(values.astype(np.float32)).max())
        raise NumericalError(
            f"{name}: |{worst:.6g}| does not fit float16 (largest 65504)",
            hint="store it as bf16: --dtype bf16",
        )
    return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatStore:
    """Keep a tensor dense, cast to ``dtype``; integers and booleans pass with their own dtype."""

    dtype: DType

    @property
    def label(self) -> str:
        """``bf16``, ``f16``, ``f32`` or the safetensors name of another dtype."""
        return _SHORT.get(self.dtype, self.dtype.value.lower())

    @property
    def scratch_bytes(self) -> int:
        """The cast returns its result and nothing else."""
        return 0

    def outputs(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """The tensor itself."""
        return (StoredTensor(name=name, dtype=self.dtype, shape=tuple(shape)),)

    def run(self, name: str, weight: NDArray[Any]) -> QuantResult:
        """Cast ``weight``."""
        return QuantResult(tensors={name: cast(name, weight, self.dtype)})

    def run_rows(self, name: str, shape: tuple[int, ...], read_rows: ReadRows) -> QuantResult:
        """Cast a tensor of ``shape`` that is read at once, in its source dtype."""
        return self.run(name, read_rows(0, shape[0] if shape else 1).reshape(shape))

    def config_entry(self) -> ConfigEntry:
        """Dense: an explicit ``false``."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineRtn:
    """``mx.quantize`` of a weight ``[..., in]`` rounded to ``dtype``; see the module docstring."""

    bits: int
    group_size: int
    mode: Mode = "affine"
    dtype: DType = DType.BF16
    threads: int = 0

    def __post_init__(self) -> None:
        try:
            AffineSpec(bits=self.bits, group_size=self.group_size, mode=self.mode)
        except ValueError as error:
            raise UserError(str(error)) from error

    @property
    def label(self) -> str:
        """``affine4 g64`` or the name of the floating-point mode."""
        return f"affine{self.bits} g{self.group_size}" if self.mode == "affine" else self.mode

    @property
    def scratch_bytes(self) -> int:
        """Chunks in flight: the floating-point modes build float32 temporaries of each."""
        return (32 if self.mode == "affine" else 128) << 20

    def outputs(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """``.weight`` uint32 words, ``.scales`` and, for affine, ``.biases``."""
        if len(shape) < 2 or shape[-1] % self.group_size:
            raise UserError(
                f"{name}: {list(shape)} has no input dimension divisible by group size {self.group_size}",
                hint="choose a smaller group, or keep the module dense: --rule 'GLOB=float'",
            )
        module, *lead, width = module_of(name), *shape
        groups = (*lead, width // self.group_size)
        words = StoredTensor(name=name, dtype=DType.U32, shape=(*lead, width * self.bits // 32))
        if self.mode != "affine":
            return words, StoredTensor(name=f"{module}.scales", dtype=DType.U8, shape=groups)
        return (
            words,
            StoredTensor(name=f"{module}.scales", dtype=self.dtype, shape=groups),
            StoredTensor(name=f"{module}.biases", dtype=self.dtype, shape=groups),
        )

    def config_entry(self) -> ConfigEntry:
        """The three keys mlx-lm reads, ``mode`` always written: it is not inherited from the top level."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def run(self, name: str, weight: NDArray[Any]) -> QuantResult:
        """Pack ``weight`` (``[..., in]``, float)."""
        rows = weight.reshape(-1, weight.shape[-1])
        return self.run_rows(name, weight.shape, lambda start, stop: rows[start:stop])

    def run_rows(self, name: str, shape: tuple[int, ...], read_rows: ReadRows) -> QuantResult:
        """Pack a weight of ``shape`` that is read while it is packed, in chunks of ``CHUNK_ELEMENTS``."""
        planned = self.outputs(name, shape)
        stored = [np.empty(_rows_shape(tensor.shape), tensor.dtype.numpy) for tensor in planned]
        n_rows = math.prod(shape[:-1])
        step = max(1, CHUNK_ELEMENTS // shape[-1])
        chunks = ((start, min(start + step, n_rows)) for start in range(0, n_rows, step))
        pack = self._pack_affine if self.mode == "affine" else self._pack_float
        lost = _Lost(self.group_size)
        pack(stored, ((start, cast(name, read_rows(start, stop), self.dtype)) for start, stop in chunks), lost)
        for tensor, values in zip(planned[1:], stored[1:], strict=True):
            if tensor.dtype.is_float and not np.isfinite(values).all():
                raise NumericalError(
                    f"{tensor.name}: a group's range does not fit {tensor.dtype.value}",
                    hint="keep the module dense: --rule 'GLOB=float', or take a wider --dtype",
                )
        tensors = {t.name: v.reshape(t.shape) for t, v in zip(planned, stored, strict=True)}
        return QuantResult(tensors=tensors, notes=lost.notes(name))

    def _pack_affine(self, stored: list[NDArray[Any]], chunks: Chunks, lost: _Lost) -> None:
        """Our own kernel: MLX's loop is scalar and several times slower."""
        del lost  # scales are floats: what is too wide for them is looked for, and none is too small
        threads = self.threads or 1  # one keeps pace with the hashing that runs beside it
        for start, chunk in chunks:
            rows = np.ascontiguousarray(chunk if self.dtype is DType.BF16 else chunk.astype(np.float32, copy=False))
            parts = native.affine_quantize(rows, bits=self.bits, group_size=self.group_size, threads=threads)
            with np.errstate(over="ignore"):  # looked for when all rows are packed
                for target, part in zip(stored, parts, strict=True):
                    target[start : start + part.shape[0]] = part.astype(target.dtype, copy=False)

    def _pack_float(self, stored: list[NDArray[Any]], chunks: Chunks, lost: _Lost) -> None:
        """``mx.quantize``, one MLX stream per thread, ``PENDING_CHUNKS`` chunks queued on each."""
        import mlx.core as mx

        streams = _streams(self.threads or min(os.cpu_count() or 1, MAX_STREAMS))
        pending: deque[tuple[int, NDArray[Any], list[mx.array]]] = deque()

        def collect() -> None:
            start, chunk, parts = pending.popleft()
            _collect(stored, start, parts)
            if self.mode == "nvfp4":  # e8m0 scales of the other modes reach down to 2^-127
                lost.add(chunk, stored[1][start : start + chunk.shape[0]])

        for index, (start, chunk) in enumerate(chunks):
            if len(pending) == PENDING_CHUNKS * len(streams):
                collect()
            parts = mx.quantize(
                mx.array(chunk),
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
                stream=streams[index % len(streams)],
            )
            mx.async_eval(*parts)  # type: ignore[no-untyped-call]
            pending.append((start, chunk, list(parts)))
        while pending:
            collect()


class _Lost:
    """Groups that decode to zeros because their scale, an e4m3 number of at least 2^-9, is rounded to zero."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._groups = self._vanished = 0
        self._energy = self._vanished_energy = 0.0

    def add(self, chunk: NDArray[Any], scales: NDArray[np.uint8]) -> None:
        """Count in ``chunk [rows, in]`` with its ``scales [rows, in / group]``."""
        wide = chunk.astype(np.float32).reshape(*scales.shape, self._group_size)
        energy = np.einsum("rgi,rgi->rg", wide, wide, dtype=np.float64)
        vanished = (scales == 0) & (energy > 0)
        self._groups += energy.size
        self._vanished += int(np.count_nonzero(vanished))
        self._energy += float(energy.sum())
        self._vanished_energy += float(energy[vanished].sum())

    def notes(self, name: str) -> tuple[str, ...]:
        """What to say of it; NumericalError where it costs more than the rounding of all that is left."""
        if not self._vanished:
            return ()
        text = f"{self._vanished} of {self._groups} groups of {self._group_size} are too small for nvfp4's scales"
        if self._vanished_energy > NVFP4_ERROR * self._energy:
            raise NumericalError(
                f"{name}: {text}: they would be zeros, {self._vanished_energy / self._energy:.0%} of the weight",
                hint="pack it in another mode: --rule 'GLOB=mode:affine,bits:8,group:64'",
            )
        return (f"{text} and became zeros, {self._vanished_energy / self._energy:.1e} of the weight",)


@lru_cache(maxsize=4)
def _streams(count: int) -> list[mx.Stream]:
    """One thread each, for the life of the process: MLX has no way to end a stream."""
    import mlx.core as mx

    return [mx.new_stream(mx.cpu) for _ in range(count)]


def _rows_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


def _collect(stored: list[NDArray[Any]], start: int, parts: list[mx.array]) -> None:
    """Copy one finished chunk into place."""
    for target, part in zip(stored, parts, strict=True):
        values = np.asarray(part)
        target[start : start + values.shape[0]] = values
