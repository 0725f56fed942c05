"""Hessians for the solvers: from a calibration folder, checked against the job, loaded one module at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool import native
from tqtool.errors import ArtifactError, UserError
from tqtool.formats.affine import AffineSpec, dequantize
from tqtool.formats.hessians import Calibration, InputMoments, open_calibration
from tqtool.formats.trellis import TrellisSpec
from tqtool.solve.feedback import DAMPINGS
from tqtool.solve.gptq import AffineGptq, GptqOptions
from tqtool.solve.hessian import Hessian
from tqtool.solve.ldlq import ldlq_encode
from tqtool.solve.ldlq_coder import LdlqOptions
from tqtool.solve.quantizer import ConfigEntry, Quantizer, QuantResult, StoredTensor, module_of
from tqtool.solve.rtn import AffineRtn
from tqtool.solve.trellis import Coded, Tick, TrellisOptions
from tqtool.source.checkpoint import Checkpoint
from tqtool.source.fingerprint import fingerprint
from tqtool.transform.folds import Channels
from tqtool.transform.plan import OutputTensor, Role, TransformPlan

SINK_WEIGHT = 32.0
"""How many ordinary rows one sink row counts for. SmolLM2-135M at 4 bits, contexts of 512, KL at weights 0, 1, 16 and
256: .447, .124, .097, .095; round-to-nearest .373. Left out, sinks make GPTQ worse than rounding."""

LONGEST_SINK = 2.0
"""How many ordinary rows long a sink may be, see ``capped``. SmolLM2-135M, trellis k=3 in tiles, KL at 1, √2, 2 and √8
in the fourteen down_proj and o_proj whose sinks are long: .322, .312, .306, .312. On other rows: .294 at 1, .333 with
no limit."""

MASSIVE = 10.0
"""A sink that is so many ordinary rows long: the layer makes, or takes back, the massive activation. In SmolLM2-135M
the down_proj of layers 1, 2, 9, 11 and 28 see such ones, 13 to 560 times as long."""

FIRST_DAMPING = 0.03
FIRST_DAMPING_DOWN = 0.3
"""Where the solvers begin to damp. An MLP's inner activations are so heavy-tailed that 32 768 tokens do not settle
their correlations: at GPTQ's usual 0.01 a down_proj of SmolLM2 errs 1.15-1.2 times as much on other text as at 0.3, on
16 384 tokens less up to 1.5 times. The inputs of other layers, behind a norm, want 0.03-0.1."""
FIRST_DAMPING_FEW = 1.0
"""The same for a down_proj that read fewer rows than it has inputs, as an expert's may: at 0.3 it errs up to 1.17 times
as much on other tokens of its kind, and where those differ most it errs more than rounding (docs/log.md)."""

WIDER_SHARE = 0.25
"""What all tokens of a layer count for beside those that one expert read, in rows for each input: an expert of 2048
inputs that read 512 tokens is solved under the mean of both. One that read none is solved under theirs alone."""

MOST_SINK_WEIGHT = 1e6
"""Larger weights are refused: the damping, at least 1 % of the mean diagonal, grows with them and would outweigh all
that ordinary rows add."""

CALIBRATED_ROLES = frozenset(
    {
        *(Role.QKV, Role.Q, Role.K, Role.V, Role.O, Role.GATE_UP, Role.GATE, Role.UP, Role.DOWN),
        *(Role.LINEAR_IN, Role.LINEAR_OUT, Role.RATE, Role.ROUTER, Role.HEAD),
    }
)
"""What a solver may take. A tied embedding is looked up too, where the head's Hessian says nothing: it is rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hessians:
    """The Hessian of every module of one job."""

    calibration: Calibration
    sink_weight: float = SINK_WEIGHT
    channels: Mapping[str, Channels] = field(default_factory=dict)
    """Modules whose inputs are reordered: their statistics are handed out in the new order."""

    def has(self, output: OutputTensor) -> bool:
        """True when ``output`` may be solved under a Hessian and there is one.

        An expert that no token was sent to has one if the tokens that could have been are known: for gate and up.
        """
        if output.module is None or output.role not in CALIBRATED_ROLES:
            return False
        record = self.calibration.info.input_of(output.module)
        return record is not None and (record.rows + record.sinks > 0 or record.wider is not None)

    def rows(self, output: OutputTensor) -> int:
        """Ordinary rows that ``output`` itself read."""
        record = None if output.module is None else self.calibration.info.input_of(output.module)
        return 0 if record is None else record.rows

    def notes(self, output: OutputTensor) -> tuple[str, ...]:
        """What to say of a module that has a Hessian, but not one of its own."""
        record = None if output.module is None else self.calibration.info.input_of(output.module)
        if record is None or record.rows + record.sinks or record.wider is None:
            return ()
        return ("calibrated on all tokens of its layer: none was sent to it",)

    def moments(self, module: str) -> InputMoments:
        """What was stored for ``module``; ArtifactError if it is not there or damaged."""
        record, moments = self.calibration.info.input_of(module), self.calibration.moments(module)
        if record is not None and record.wider is not None:
            moments = blended(moments, self.calibration.moments(record.wider))
        if moments is None:
            raise ArtifactError(f"{self.calibration.folder}: no moments of {module}", hint="calibrate again")
        channels = self.channels.get(module)
        moments = capped(moments)
        return moments if channels is None else reordered(moments, channels)

    def curvature(self, module: str) -> NDArray[np.float64]:
        """Diagonal of the Hessian of ``module``, ``[in]``."""
        moments = self.moments(module)
        sinks = np.square(moments.sinks.astype(np.float64)).sum(axis=0)
        whole = np.diagonal(moments.matrix).astype(np.float64) * moments.rows + self.sink_weight * sinks
        return np.asarray(whole / (moments.rows + len(moments.sinks)))

    def is_massive(self, module: str) -> bool:
        """True where a sink's input of ``module`` is ``MASSIVE`` times as long as an ordinary row's."""
        moments = self.calibration.moments(module)
        if moments is None:
            return False
        return bool(_energies(moments).max(initial=0.0) > _energy_of(MASSIVE, moments))

    def hessian(self, moments: InputMoments) -> Hessian:
        """Ordinary rows and sinks together."""
        return combine(moments, sink_weight=self.sink_weight)

    def recipe(self, module: str) -> dict[str, Any]:
        """Names the Hessian of ``module`` by content."""
        info = self.calibration.info
        record = info.input_of(module)
        assert record is not None, "asked for modules that have one"
        facts = {
            "file_sha256": info.files[record.file],
            "input": record.key,
            "rows": record.rows,
            "sink_weight": self.sink_weight,
        }
        return facts if record.wider is None else facts | {"wider": record.wider, "wider_share": WIDER_SHARE}

    def to_json(self) -> dict[str, Any]:
        """What the manifest records."""
        info = self.calibration.info
        text = {"sha256": info.text.sha256, "first_byte": info.text.first_byte}
        return {"sha256": info.content_sha256(), "text": text, "sink_weight": self.sink_weight}


def dampings_of(output: OutputTensor, rows: int) -> tuple[float, ...]:
    """Dampings to try for a module whose Hessian is of ``rows`` rows, in order."""
    first = FIRST_DAMPING
    if output.role is Role.DOWN:
        first = FIRST_DAMPING_DOWN if rows >= output.shape[-1] else FIRST_DAMPING_FEW
    return tuple(damping for damping in DAMPINGS if damping >= first)


def blended(own: InputMoments | None, wider: InputMoments | None) -> InputMoments | None:
    """What one expert read, and beside it, for ``WIDER_SHARE`` rows an input, what all tokens of the layer bring.

    Few rows do not span their space, and an expert will read tokens unlike those it read here.
    """
    if own is None or wider is None:
        return own if wider is None else wider
    share = WIDER_SHARE * len(own.matrix)
    matrix = (own.rows * own.matrix + np.float32(share) * wider.matrix) / np.float32(own.rows + share)
    return InputMoments(matrix=matrix.astype(np.float32), sinks=own.sinks, rows=own.rows + round(share))


def capped(moments: InputMoments) -> InputMoments:
    """Sinks at most ``LONGEST_SINK`` times as long as an ordinary row (root of the mean energy).

    Behind a norm all rows are of one size. Inside an MLP a sink's activation is up to five hundred times theirs; at
    full size it is all that H knows, and the solver gives up on every other token. But where it is that long the layer
    makes the massive activation that all later layers see, normalized, at that token: not to be spoiled either.
    """
    if not moments.rows:  # an expert that reads nothing else
        return moments
    largest = _energy_of(LONGEST_SINK, moments)
    factor = np.sqrt(largest / np.maximum(_energies(moments), max(largest, np.finfo(np.float64).tiny)))
    return replace(moments, sinks=(moments.sinks * factor[:, None]).astype(np.float32))


def _energies(moments: InputMoments) -> NDArray[np.float64]:
    """Squared length of each sink, ``[m]``."""
    return np.asarray(np.einsum("sc,sc->s", moments.sinks, moments.sinks, dtype=np.float64))


def _energy_of(length: float, moments: InputMoments) -> float:
    """Squared length of a row ``length`` times as long as an ordinary one."""
    return length**2 * float(np.trace(moments.matrix, dtype=np.float64))


def reordered(moments: InputMoments, channels: Channels) -> InputMoments:
    """What an input with ``channels`` is: ``(x ∘ scale)[order]``."""
    order, scale = channels.order, channels.scale
    matrix = (moments.matrix * scale[:, None] * scale)[np.ix_(order, order)]
    return InputMoments(matrix=matrix, sinks=(moments.sinks * scale)[:, order], rows=moments.rows)


def combine(moments: InputMoments, *, sink_weight: float) -> Hessian:
    """``(rows·H + w·Σ s·sᵀ) / (rows + m)`` in float64."""
    sinks = moments.sinks.astype(np.float64)
    matrix = moments.matrix.astype(np.float64) * moments.rows
    matrix += sink_weight * (sinks.T @ sinks)
    rows = moments.rows + len(sinks)
    return Hessian(matrix=matrix / rows, rows=rows)


def open_hessians(folder: Path, checkpoint: Checkpoint, transform: TransformPlan, *, sink_weight: float) -> Hessians:
    """Open a calibration folder for a job.

    Raises:
        UserError: it was made from another source, or in another basis.
        ArtifactError: it is damaged.
    """
    if sink_weight < 0 or not np.isfinite(sink_weight):
        raise UserError(f"--sink-weight {sink_weight}: expected a number that is not negative")
    if sink_weight > MOST_SINK_WEIGHT:
        raise UserError(
            f"--sink-weight {sink_weight:g}: expected at most {MOST_SINK_WEIGHT:g}",
            hint="beyond it the damping, a share of the mean diagonal, outweighs all that ordinary rows add",
        )
    calibration = open_calibration(folder)
    info = calibration.info
    if (info.transform, info.rotation_seed) != (transform.id, transform.seed):
        raise UserError(
            f"{folder}: calibrated for {_basis(info.transform, info.rotation_seed)}, "
            f"the job is {_basis(transform.id, transform.seed)}",
            hint="calibrate again as the job rotates: --rotate-weights for trellis, none for a plain convert",
        )
    if info.source_fingerprint != fingerprint(checkpoint):
        raise UserError(f"{folder}: calibrated on other weights than {checkpoint.path}", hint="calibrate this model")
    return Hessians(calibration=calibration, sink_weight=sink_weight)


def _basis(transform: str, seed: int | None) -> str:
    return transform if seed is None else f"{transform} with seed {seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedAffine:
    """GPTQ of one module; its Hessian is read when its turn comes and forgotten after it."""

    options: GptqOptions
    width: int
    hessians: Hessians

    @property
    def label(self) -> str:
        """``gptq affine4 g64``."""
        return f"gptq {self.options.plain.label}"

    @property
    def scratch_bytes(self) -> int:
        """The Hessian as stored and in float64, its factor and a copy."""
        return 32 * self.width**2 + (64 << 20)

    def recipe(self, name: str) -> dict[str, Any]:
        """Options and Hessian."""
        options = {**asdict(self.options), "dtype": self.options.dtype.value}
        return {"label": self.label, **options, "hessian": self.hessians.recipe(module_of(name))}

    def outputs(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """As round-to-nearest."""
        return self.options.plain.outputs(name, shape)

    def config_entry(self) -> ConfigEntry:
        """As round-to-nearest."""
        return self.options.plain.config_entry()

    def run(self, name: str, weight: NDArray[np.float32]) -> QuantResult:
        """Quantize ``weight [out, in]``; stats say what it costs at ordinary positions and at sinks."""
        moments = self.hessians.moments(module_of(name))
        result = AffineGptq(options=self.options, hessian=self.hessians.hessian(moments)).run(name, weight)
        rounded = self.options.plain.run(name, weight)
        served = {"": self._served(result), "_rtn": self._served(rounded)}
        errors = position_errors(weight, served, moments)
        return replace(result, stats={**result.stats, **errors})

    def _served(self, result: QuantResult) -> NDArray[np.float32]:
        words, scales, biases = result.tensors.values()
        return dequantize(words, scales, biases, AffineSpec(bits=self.options.bits, group_size=self.options.group_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class LdlqEncoder:
    """The trellis with feedback under the module's Hessian, read when its turn comes and forgotten after it."""

    width: int
    hessians: Hessians
    dampings: tuple[float, ...] = DAMPINGS
    prefix: str = "ldlq"

    @property
    def scratch_bytes(self) -> int:
        """The Hessian as stored and in float64, its factor and a copy."""
        return 32 * self.width**2

    def recipe(self, name: str) -> dict[str, Any]:
        """Settings of the feedback and Hessian."""
        options = {field.name: field.default for field in fields(LdlqOptions) if field.name != "trellis"}
        return {**options, "dampings": self.dampings, "hessian": self.hessians.recipe(module_of(name))}

    def __call__(
        self, name: str, weight: NDArray[np.float32], spec: TrellisSpec, options: TrellisOptions, tick: Tick
    ) -> Coded:
        """Code ``weight [out, in]``; stats say what it costs at ordinary positions and at sinks."""
        moments = self.hessians.moments(module_of(name))
        ldlq = LdlqOptions(trellis=options, dampings=self.dampings)
        result = ldlq_encode(name, weight, self.hessians.hessian(moments), spec, ldlq)
        tick(weight.size)
        stats, notes = result.report()
        stored = native.trellis_expand(result.matrix.words, result.matrix.scales, spec)
        served = stored if spec.axis == 1 else stored.T
        return Coded(
            matrix=result.matrix, stats={**stats, **position_errors(weight, {"": served}, moments)}, notes=notes
        )


def position_errors(
    weight: NDArray[np.float32], served: Mapping[str, NDArray[np.float32]], moments: InputMoments
) -> dict[str, float]:
    """Relative squared output errors ``‖E·x‖² / ‖W·x‖²`` over ordinary rows and over sinks, by suffix of the name."""
    energies = {"rows": _row_energy, "sinks": _sink_energy}
    stats = {}
    for where, energy in energies.items():
        whole = energy(weight, moments)
        for suffix, values in served.items():
            stats[f"error_{where}{suffix}"] = energy(values - weight, moments) / whole if whole else 0.0
    return stats


def _row_energy(matrix: NDArray[np.float32], moments: InputMoments) -> float:
    return float(np.einsum("rc,rc->", matrix @ moments.matrix, matrix, dtype=np.float64))


def _sink_energy(matrix: NDArray[np.float32], moments: InputMoments) -> float:
    return float(np.sum(np.square(matrix @ moments.sinks.T), dtype=np.float64))


def calibrated_affine(
    quantizers: Mapping[str, Quantizer], outputs: tuple[OutputTensor, ...], hessians: Hessians
) -> tuple[dict[str, Quantizer], dict[str, tuple[str, ...]]]:
    """Put GPTQ in the place of affine round-to-nearest wherever there is a Hessian.

    Returns:
        All quantizers, and a note for each affine module that is still rounded to nearest.
    """
    result = dict(quantizers)
    notes: dict[str, tuple[str, ...]] = {}
    for output in outputs:
        plain = quantizers[output.name]
        if not isinstance(plain, AffineRtn):
            continue
        if plain.mode != "affine":
            raise UserError(
                f"GPTQ is for affine modules; {output.module} is {plain.mode}", hint="--method rtn, or --bits"
            )
        for piece in output.pieces:
            if not hessians.has(piece):
                notes[piece.name] = ("rounded to nearest: nothing to calibrate it on",)
                continue
            # The searched grid ends at 0.6 times the proxy loss of mx.quantize's, in a third of act-order's time.
            options = GptqOptions(
                bits=plain.bits,
                group_size=plain.group_size,
                dtype=plain.dtype,
                grid="search",
                dampings=dampings_of(piece, hessians.rows(piece)),
            )
            if lines := hessians.notes(piece):
                notes[piece.name] = lines
            result[piece.name] = CalibratedAffine(options=options, width=piece.shape[-1], hessians=hessians)
    return result, notes
