"""Trellis quantizers: a weight → row scales and paths, stored packed, as decoded values, or in an 8-bit carrier.

The row scale is the row's root mean square over the code's best source scale (``mathx.codes.CODE_SCALE``), rounded to
float16 before
the search, so the encoder sees exactly what the decoder will multiply by. After the search it is refitted by least
squares on the
states found, which costs nothing at decode.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tqtool import native
from tqtool.errors import UserError
from tqtool.formats.dtypes import DType
from tqtool.formats.trellis import BLOCK, TrellisSpec, spec_for
from tqtool.mathx import codes
from tqtool.solve.quantizer import ConfigEntry, QuantResult, StoredTensor, module_of
from tqtool.solve.rtn import AffineRtn, cast
from tqtool.solve.search import Device, search
from tqtool.solve.trellis_rows import pack_closed, refit_scales, row_scales, squared_errors, to_levels

CHUNK_WEIGHTS = 1 << 21
"""Weights coded between two progress reports: under a second of work, and what bounds the temporaries (about 20 MB)."""

Tick = Callable[[int], None]


def _no_tick(weights: int) -> None:
    del weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TrellisOptions:
    """What the user may choose about the code; the axis is chosen per module.

    Attributes:
        k: Bits per weight, 1..4.
        window: L, state bits.
        code: How a state becomes a value.
        warmup: Steps on each side of the seam in the first pass; None is Algorithm 4 of QTIP (T/2).
        threads: 0 for one per core; does not change the result.
        refit: Refit row scales by least squares after the search.
        device: Where paths are searched; does not change the result.
    """

    k: int
    window: int = 12
    code: codes.Code = "mul1"
    warmup: int | None = None
    threads: int = 0
    refit: bool = True
    device: Device = "cpu"

    def __post_init__(self) -> None:
        spec_for((1, BLOCK), k=self.k, axis=1, window=self.window, code=self.code)  # the same checks, before any work
        if self.warmup is not None and not 1 <= self.warmup <= BLOCK // 2:
            raise UserError(
                f"--warmup {self.warmup}: expected 1..{BLOCK // 2} steps", hint="32 or 64 is the usual choice"
            )

    def search(self, inputs: NDArray[np.int16], levels: NDArray[np.int16]) -> NDArray[np.uint16]:
        """States ``[n, 256]`` of the best paths for ``inputs [n, 256]`` in level units, where ``device`` says."""
        return search(
            inputs, levels, window=self.window, k=self.k, warmup=self.warmup, device=self.device, threads=self.threads
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrellisMatrix:
    """One coded weight.

    Attributes:
        spec: Shape and code.
        words: uint32, ``spec.words_shape``.
        scales: float16 ``[rows]``.
        squared_error: Sum of squared differences to the weight.
        squared_norm: Sum of squares of the weight.
    """

    spec: TrellisSpec
    words: NDArray[np.uint32]
    scales: NDArray[np.float16]
    squared_error: float
    squared_norm: float

    @property
    def relative_error(self) -> float:
        """Squared error over squared norm: for Gaussian weights the mean squared error of the code."""
        return self.squared_error / self.squared_norm if self.squared_norm else 0.0


def encode_weight(
    name: str, weight: NDArray[np.float32], spec: TrellisSpec, options: TrellisOptions, *, tick: Tick = _no_tick
) -> TrellisMatrix:
    """Code ``weight`` ``[out, in]`` as ``spec`` says.

    Peak memory beyond the weight and the result: a few times ``CHUNK_WEIGHTS`` float32.

    Raises:
        NumericalError: a row's scale does not fit float16.
        BackendError: the compiled encoder returned a path that the format cannot hold.
    """
    stored = weight if spec.axis == 1 else weight.T
    scales = row_scales(name, stored, options.k)
    levels = codes.levels(options.code, options.window)
    words = np.empty((spec.n_blocks, spec.words_per_block), np.uint32)
    error = norm = 0.0
    for start, stop in row_chunks(spec):
        rows = np.ascontiguousarray(stored[start:stop], np.float32)
        part, threads = replace(spec, rows=len(rows)), options.threads
        inputs = part.to_stream(to_levels(rows, scales[start:stop], options.code, threads=threads))
        states = options.search(inputs, levels)
        packed = pack_closed(name, states, spec, threads=threads)
        first = start * spec.stride // spec.block
        words[first : first + len(states)] = packed
        ones = np.ones(len(rows), np.float16)
        decoded = native.trellis_expand(packed.reshape(part.words_shape), ones, part, threads=threads)
        products = native.row_products(rows, decoded, threads=threads)
        if options.refit:
            scales[start:stop] = refit_scales(products, scales[start:stop])
        error += float(np.sum(squared_errors(products, scales[start:stop])))
        norm += float(np.sum(products[:, 2]))
        tick(rows.size)
    return TrellisMatrix(
        spec=spec, words=words.reshape(spec.words_shape), scales=scales, squared_error=error, squared_norm=norm
    )


def row_chunks(spec: TrellisSpec) -> Iterator[tuple[int, int]]:
    """Row ranges that start on a block, each about ``CHUNK_WEIGHTS`` long."""
    step = max(1, CHUNK_WEIGHTS // (spec.stride * spec.row_group)) * spec.row_group
    for start in range(0, spec.rows, step):
        yield start, min(start + step, spec.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A coded weight with what the manifest says of how it was found."""

    matrix: TrellisMatrix
    stats: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Encoder(Protocol):
    """Finds the path of a weight: the search alone, or with feedback under a Hessian."""

    @property
    def prefix(self) -> str:
        """Begins the quantizer's label: empty, or ``ldlq``."""

    @property
    def scratch_bytes(self) -> int:
        """Memory beyond that of the plain search."""

    def recipe(self, name: str) -> dict[str, Any]:
        """What decides its result beside the code."""

    def __call__(
        self, name: str, weight: NDArray[np.float32], spec: TrellisSpec, options: TrellisOptions, tick: Tick
    ) -> Coded:
        """Code ``weight [out, in]`` as ``spec`` says."""


@dataclass(frozen=True, slots=True)
class PlainEncoder:
    """The search alone: every weight counts the same."""

    prefix: str = ""
    scratch_bytes: int = 0

    def recipe(self, name: str) -> dict[str, Any]:
        """Nothing."""
        return {}

    def __call__(
        self, name: str, weight: NDArray[np.float32], spec: TrellisSpec, options: TrellisOptions, tick: Tick
    ) -> Coded:
        """See ``encode_weight``."""
        return Coded(matrix=encode_weight(name, weight, spec, options, tick=tick))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trellis:
    options: TrellisOptions
    axis: Literal[0, 1]
    tile: bool = False
    tick: Tick = field(default=_no_tick, compare=False)
    encoder: Encoder = field(default=PlainEncoder())

    def spec(self, shape: tuple[int, ...], name: str) -> TrellisSpec:
        """Spec of a weight ``[out, in]``."""
        if len(shape) != 2:
            raise UserError(f"{name}: {list(shape)} is not a matrix", hint="the trellis codes linear layers")
        options = self.options
        return spec_for(
            (shape[0], shape[1]),
            k=options.k,
            axis=self.axis,
            window=options.window,
            code=options.code,
            tile=self.tile,
        )

    def encode(self, name: str, weight: NDArray[np.float32]) -> Coded:
        """The coded weight, with statistics and notes for the manifest."""
        coded = self.encoder(name, weight, self.spec(weight.shape, name), self.options, self.tick)
        matrix = coded.matrix
        stats = {"relative_error": matrix.relative_error, "padded_weights": float(matrix.spec.n_padding)}
        dead = int(np.count_nonzero(matrix.scales == 0))
        notes = (f"{dead} rows of zeros",) if dead else ()
        return Coded(matrix=matrix, stats={**stats, **coded.stats}, notes=(*notes, *coded.notes))

    @property
    def scratch_bytes(self) -> int:
        """Memory of one chunk in flight (32 bytes a weight, measured) and of the encoder's cost rows, per thread."""
        threads = self.options.threads or os.cpu_count() or 1
        cost_rows = 8 * (BLOCK + 3) << (self.options.window - self.options.k)
        return 32 * CHUNK_WEIGHTS + threads * cost_rows + self.encoder.scratch_bytes

    def recipe(self, name: str) -> dict[str, Any]:
        """Code, axis, form and what the encoder adds; not where paths are searched, but where feedback is summed."""
        options = {key: value for key, value in asdict(self.options).items() if key not in ("threads", "device")}
        encoder = self.encoder.recipe(name)
        if self.encoder.prefix and self.tile and self.options.device != "cpu":
            encoder = {**encoder, "products": self.options.device}
        return {"label": self.label, "axis": self.axis, "tile": self.tile, **options, "encoder": encoder}

    @property
    def label(self) -> str:
        """``trellis k3 mul1 tile`` or ``axis1``; forms that do not store it packed say so."""
        return self.name

    @property
    def name(self) -> str:
        window = "" if self.options.window == 12 else f" L{self.options.window}"
        layout = "tile" if self.tile else f"axis{self.axis}"
        prefix = f"{self.encoder.prefix} " if self.encoder.prefix else ""
        return f"{prefix}trellis k{self.options.k} {self.options.code}{window} {layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrellisPacked(_Trellis):
    """Words and scales as ``formats.trellis`` packs them."""

    def outputs(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """``.weight`` uint32 words and ``.scales`` float16."""
        if self.options.code not in codes.COMPUTED_CODES:
            raise UserError(
                f"code {self.options.code!r} needs a table at decode and is for measurements only",
                hint=f"pack with {', '.join(codes.COMPUTED_CODES)}, or write --fake-quant",
            )
        spec = self.spec(shape, name)
        return (
            StoredTensor(name=name, dtype=DType.U32, shape=spec.words_shape),
            StoredTensor(name=f"{module_of(name)}.scales", dtype=DType.F16, shape=(spec.rows,)),
        )

    def run(self, name: str, weight: NDArray[np.float32]) -> QuantResult:
        """Code and pack."""
        coded = self.encode(name, weight)
        tensors: dict[str, NDArray[Any]] = {name: coded.matrix.words, f"{module_of(name)}.scales": coded.matrix.scales}
        return QuantResult(tensors=tensors, stats=coded.stats, notes=coded.notes)

    def config_entry(self) -> ConfigEntry:
        """Not listed in ``quantization``: stock loaders would refuse the entry. It stands under ``trellis``."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrellisFakeQuant(_Trellis):
    """The decoded values, rounded to ``dtype``: what the packed matrix expands to, loadable by stock mlx-lm."""

    dtype: DType = DType.BF16

    def recipe(self, name: str) -> dict[str, Any]:
        """Also the type the values are rounded to."""
        return {**_Trellis.recipe(self, name), "dtype": self.dtype.value}

    @property
    def label(self) -> str:
        """``fake trellis k3 mul1 axis1``."""
        return f"fake {self.name}"

    def outputs(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """One dense tensor."""
        self.spec(shape, name)
        return (StoredTensor(name=name, dtype=self.dtype, shape=tuple(shape)),)

    def run(self, name: str, weight: NDArray[np.float32]) -> QuantResult:
        """Code, decode, round."""
        values, coded = _decoded(self, name, weight)
        return QuantResult(tensors={name: cast(name, values, self.dtype)}, stats=coded.stats, notes=coded.notes)

    def config_entry(self) -> ConfigEntry:
        """Dense: an explicit ``false``."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrellisCarrier(_Trellis):
    """The decoded values in 8-bit affine: stock mlx-lm's speed and about twice the packed size."""

    carrier: AffineRtn

    def recipe(self, name: str) -> dict[str, Any]:
        """Also the carrier, whose label names its packing."""
        return {**_Trellis.recipe(self, name), "dtype": self.carrier.dtype.value}

    @property
    def label(self) -> str:
        """``trellis k3 mul1 axis1 in affine8 g64``."""
        return f"{self.name} in {self.carrier.label}"

    def outputs(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """What the carrier stores."""
        self.spec(shape, name)
        return self.carrier.outputs(name, shape)

    def run(self, name: str, weight: NDArray[np.float32]) -> QuantResult:
        """Code, decode, quantize to the carrier."""
        values, coded = _decoded(self, name, weight)
        carried = self.carrier.run(name, values)
        stats, notes = {**coded.stats, **carried.stats}, (*coded.notes, *carried.notes)
        return QuantResult(tensors=carried.tensors, stats=stats, notes=notes)

    def config_entry(self) -> ConfigEntry:
        """The carrier's."""
        return self.carrier.config_entry()


def _decoded(quantizer: _Trellis, name: str, weight: NDArray[np.float32]) -> tuple[NDArray[np.float32], Coded]:
    coded = quantizer.encode(name, weight)
    matrix = coded.matrix
    values = native.trellis_expand(matrix.words, matrix.scales, matrix.spec, threads=quantizer.options.threads)
    return np.ascontiguousarray(values if quantizer.axis == 1 else values.T), coded
