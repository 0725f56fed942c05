"""What every solver promises: the names and sizes it will store, then exactly those tensors.

Laws, checked by the job for every quantizer:

* ``run(name, weight).tensors`` is ``outputs(name, weight.shape)``: same names, order, dtypes, shapes;
* ``run`` never writes to ``weight`` and is a pure function of it: same bytes on every run and thread count;
* whatever was padded, clipped or done differently than asked is a line in ``notes``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from numpy.typing import NDArray

from tqtool.formats.dtypes import DType

DEFAULT_SCRATCH_BYTES = 64 << 20

ReadRows = Callable[[int, int], NDArray[Any]]
ConfigEntry = dict[str, Any] | Literal[False] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of the artifact before it exists: enough to lay out a shard."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantResult:
    """What one call of ``Quantizer.run`` made; the manifest stores ``stats`` and ``notes``."""

    tensors: Mapping[str, NDArray[Any]]
    stats: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Quantizer(Protocol):
    """Float tensor in, stored tensors out."""

    @property
    def label(self) -> str:
        """Short name for plans and manifests: ``affine4 g64``, ``bf16``, ``trellis k3 mul1``."""

    def outputs(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """What ``run`` will return for a tensor ``name`` of ``shape``; raises UserError when it cannot."""

    def run(self, name: str, weight: NDArray[Any]) -> QuantResult:
        """Quantize ``weight`` (float32, any shape accepted by ``outputs``)."""

    def config_entry(self) -> ConfigEntry:
        """Entry of the module in ``config.json: quantization``; False = dense, None = not listed there."""


@runtime_checkable
class RowQuantizer(Protocol):
    """A quantizer that can read an unfolded weight while it packs it, in the source's dtype.

    Law: ``run_rows(name, w.shape, lambda a, b: rows[a:b])`` gives the bytes of ``run(name, w)``, where ``rows`` is
    ``w`` with its leading dimensions flattened; rows are asked for once each, in order.
    """

    def run_rows(self, name: str, shape: tuple[int, ...], read_rows: ReadRows) -> QuantResult:
        """Quantize a weight of ``shape`` through ``read_rows(start, stop)``."""


@runtime_checkable
class Reusable(Protocol):
    """A quantizer whose results are worth keeping: making them takes longer than reading them."""

    def recipe(self, name: str) -> dict[str, Any]:
        """All that decides the result for the tensor ``name`` beside its values, JSON-ready."""


def scratch_bytes(quantizer: Quantizer) -> int:
    """Memory ``run`` needs beyond its input and result: the quantizer's own ``scratch_bytes``, or a plain guess."""
    return int(getattr(quantizer, "scratch_bytes", DEFAULT_SCRATCH_BYTES))


def module_of(name: str) -> str:
    """Module path of a weight: ``model.layers.0.mlp.up_proj.weight`` → ``model.layers.0.mlp.up_proj``."""
    return name.removesuffix(".weight")
