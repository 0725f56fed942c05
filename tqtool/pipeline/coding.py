"""Which modules ``tqtool trellis`` codes, and how: layout, order of channels, encoder, and the form that is stored.

In tiles every module is coded alike. Along an axis it is the one that the rotation has mixed: readers of the residual
along their inputs, writers along their outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tqtool.artifact.model_file import MODEL_FILE
from tqtool.errors import UserError
from tqtool.formats.dtypes import DType
from tqtool.formats.trellis import FORMAT_VERSION, TrellisSpec
from tqtool.pipeline.calibrated import Hessians, LdlqEncoder, dampings_of
from tqtool.pipeline.rules import Packed, Rule, matching_rule, near_names
from tqtool.solve.quantizer import Quantizer
from tqtool.solve.rtn import AffineRtn
from tqtool.solve.trellis import (
    Encoder,
    PlainEncoder,
    Tick,
    TrellisCarrier,
    TrellisFakeQuant,
    TrellisOptions,
    TrellisPacked,
)
from tqtool.source.checkpoint import Checkpoint
from tqtool.transform.channels import choose_channels, mlps, tame_outliers, with_channels
from tqtool.transform.folds import Channels
from tqtool.transform.plan import OutputTensor, Role, TransformPlan

Form = Literal["packed", "fake-quant", "carrier"]
Layout = Literal["tile", "axis"]
Axis = Literal["out", "in"]

OTHER = Packed(bits=6, group_size=64, mode="affine")
"""What the trellis does not code.

A tied embedding at 4 bits costs SmolLM2-135M four points of perplexity, at 6 bits 0.2.
"""
LOOKUP = Packed(bits=4, group_size=64, mode="affine")
"""An embedding that is not the head too is only looked up: 4 bits cost SmolLM2-135M .01 of KL and save 7 of 100 MB."""
CARRIER_BITS, CARRIER_GROUP = 8, 64

MLP_ROLES = frozenset({Role.GATE_UP, Role.GATE, Role.UP, Role.DOWN})
BLOCK_ROLES = MLP_ROLES | {Role.QKV, Role.Q, Role.K, Role.V, Role.O, Role.LINEAR_IN, Role.LINEAR_OUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """How modules are coded, the rate and the encoder apart.

    Attributes:
        form: What is stored for a module.
        layout: Tiles, or blocks along an axis.
        down_axis: Dimension along which down_proj is coded if the layout is ``axis``.
    """

    form: Form = "packed"
    layout: Layout = "axis"
    down_axis: Axis = "out"
    tick: Tick = field(default=lambda weights: None, compare=False)

    def quantizer(self, output: OutputTensor, options: TrellisOptions, encoder: Encoder, dtype: DType) -> Quantizer:
        """The quantizer of one module; ``dtype`` is that of decoded values.

        Raises:
            UserError: the carrier's groups do not divide the module's inputs.
        """
        tile = self.layout == "tile"
        along_outputs = output.role in (Role.O, Role.LINEAR_OUT) or (
            output.role is Role.DOWN and self.down_axis == "out"
        )
        axis: Literal[0, 1] = 0 if along_outputs and not tile else 1
        common: dict[str, Any] = {"options": options, "axis": axis, "tile": tile, "tick": self.tick, "encoder": encoder}
        if self.form == "packed":
            return TrellisPacked(**common)
        if self.form == "fake-quant":
            return TrellisFakeQuant(**common, dtype=dtype)
        width = output.shape[-1]
        if width % CARRIER_GROUP:
            raise UserError(
                f"{output.name}: the 8-bit carrier needs inputs divisible by {CARRIER_GROUP}, found {width}",
                hint="--fake-quant stores the same values dense",
            )
        carrier = AffineRtn(bits=CARRIER_BITS, group_size=CARRIER_GROUP, mode="affine", dtype=dtype)
        return TrellisCarrier(**common, carrier=carrier)


def parse_axis(text: str | None) -> Axis | None:
    """``out`` or ``in``, as ``--down-axis`` takes it."""
    known: dict[str | None, Axis | None] = {None: None, "out": "out", "in": "in"}
    if text not in known:
        raise UserError(f"--down-axis {text!r}: expected out or in")
    return known[text]


def parse_layout(text: str | None) -> Layout | None:
    """``tile`` or ``axis``, as ``--layout`` takes it."""
    known: dict[str | None, Layout | None] = {None: None, "tile": "tile", "axis": "axis"}
    if text not in known:
        raise UserError(f"--layout {text!r}: expected tile or axis")
    return known[text]


def parse_form(*, fake_quant: bool, carrier: bool) -> Form:
    """The form that the two flags ask for."""
    if fake_quant and carrier:
        raise UserError("--fake-quant and --carrier are two forms of one artifact", hint="leave one out")
    return "fake-quant" if fake_quant else "carrier" if carrier else "packed"


def coded_modules(transform: TransformPlan, modules: Sequence[str], rules: Sequence[Rule]) -> tuple[OutputTensor, ...]:
    """Outputs that the trellis codes: chosen by ``modules`` and not taken away by a rule.

    Raises:
        UserError: a glob matches nothing or an embedding, or nothing is left to code.
    """
    # What decides which experts run, or how fast a state forgets, is small and never coded.
    linears = [
        output
        for output in transform.outputs
        if output.module is not None and output.role not in (Role.EMBEDDING, Role.ROUTER, Role.RATE)
    ]
    chosen: set[str] = set()
    for pattern in modules:
        if pattern in ("mlp", "all"):
            roles = MLP_ROLES if pattern == "mlp" else BLOCK_ROLES
            found = [output.name for output in linears if output.role in roles]
        else:
            found = [output.name for output in linears if output.module and fnmatchcase(output.module, pattern)]
        if not found:
            near = near_names(pattern, [output.module for output in linears if output.module])
            raise UserError(f"--modules {pattern!r} matches no linear layer", hint=f"near: {', '.join(near)}")
        chosen.update(found)
    coded = tuple(output for output in linears if output.name in chosen and matching_rule(output, rules) is None)
    if not coded:
        raise UserError("the rules take every module from the trellis", hint="use tqtool convert, or narrow the rules")
    return coded


def default_rules(transform: TransformPlan, other: Packed | None) -> tuple[Rule, ...]:
    """What the user's rules start from: ``LOOKUP`` for an embedding with a head apart, unless bits were asked for."""
    tables = {output.role: output for output in transform.outputs}
    embedding = tables.get(Role.EMBEDDING)
    if other is not None or embedding is None or Role.HEAD not in tables:
        return ()
    if embedding.module is None or embedding.shape[-1] % LOOKUP.group_size:
        return ()
    text = f"{embedding.module}=bits:{LOOKUP.bits},group:{LOOKUP.group_size}"
    return (Rule(glob=embedding.module, setting=LOOKUP, text=text),)


def is_coded(quantizer: Quantizer) -> bool:
    """True for the three forms of a coded module."""
    return isinstance(quantizer, TrellisPacked | TrellisFakeQuant | TrellisCarrier)


def encoder_of(output: OutputTensor, hessians: Hessians | None) -> tuple[Encoder, tuple[str, ...]]:
    """LDLQ where there is a Hessian; a note where one was wanted and is missing."""
    if hessians is None:
        return PlainEncoder(), ()
    if not hessians.has(output):
        return PlainEncoder(), ("coded without feedback: nothing to calibrate it on",)
    encoder = LdlqEncoder(
        width=output.shape[-1], hessians=hessians, dampings=dampings_of(output, hessians.rows(output))
    )
    return encoder, hessians.notes(output)


def fold_channels(
    hessians: Hessians | None,
    checkpoint: Checkpoint,
    transform: TransformPlan,
    coded: Sequence[OutputTensor],
) -> tuple[Hessians, TransformPlan, tuple[str, ...]]:
    """Reorder the channels of each MLP whose down_proj is coded; Hessians and plan in the new order, and notes.

    Reads every such down_proj and its Hessian. gate_proj and up_proj follow, however they are stored: their outputs
    move, what they read does not. Where a sink is massive the order stays: the few channels that make a massive
    activation would share tiles, where nothing corrects their errors (layer 11 of SmolLM2-135M: .027 to .088 wrong at
    the sink, KL + .115 from this tensor alone).

    Raises:
        UserError: there are no Hessians, which say in what order, or no down_proj is left.
    """
    if hessians is None:
        raise UserError("--fold-channels needs --ldlq: the order comes from the Hessians")
    ordered: dict[str, Channels] = {}
    kept: dict[str, Channels | None] = {}
    for path, down, norms in _columns(checkpoint, transform, coded):
        if not hessians.has(down):
            continue
        if hessians.is_massive(str(down.module)):
            kept[path] = tame_outliers(norms)
        else:
            ordered[path] = choose_channels(norms, hessians.curvature(str(down.module)))
    if not ordered:
        raise UserError(
            "--fold-channels does nothing: no down_proj is coded under a Hessian without massive sinks",
            hint="--modules mlp, or leave it out",
        )
    found = ordered | {path: channels for path, channels in kept.items() if channels is not None}
    notes = (
        f"{len(kept)} of {len(kept) + len(ordered)} MLPs keep the order of their channels: their sinks are massive",
    )
    hessians = replace(hessians, channels=_by_down(transform, found))
    return hessians, with_channels(transform, found), notes if kept else ()


def tame_columns(
    hessians: Hessians | None, checkpoint: Checkpoint, transform: TransformPlan, coded: Sequence[OutputTensor]
) -> tuple[Hessians | None, TransformPlan]:
    """Shorten outlier columns of each coded down_proj, and lengthen the rows of up_proj that they read.

    In tiles a row of down_proj has one scale; reads every such down_proj.
    """
    found = {
        path: channels
        for path, _, norms in _columns(checkpoint, transform, coded)
        if (channels := tame_outliers(norms)) is not None
    }
    if hessians is not None:
        hessians = replace(hessians, channels=_by_down(transform, found))
    return hessians, with_channels(transform, found)


def _columns(
    checkpoint: Checkpoint, transform: TransformPlan, coded: Sequence[OutputTensor]
) -> Iterator[tuple[str, OutputTensor, NDArray[np.float64]]]:
    """Path of each MLP whose down_proj is coded, down_proj, norms of its columns, which rotations keep."""
    names = {piece.name for output in coded for piece in output.pieces}
    for path, down in mlps(transform).items():
        if down.name in names:
            ref = checkpoint.tensors[down.source]
            weight = np.asarray(ref.read() if down.rows is None else ref.read_flat_rows(*down.rows), np.float32)
            yield path, down, np.sqrt(np.einsum("oc,oc->c", weight, weight, dtype=np.float64))


def _by_down(transform: TransformPlan, found: Mapping[str, Channels]) -> dict[str, Channels]:
    return {str(down.module): found[path] for path, down in mlps(transform).items() if path in found}


def packed_config(coded: Sequence[OutputTensor], quantizers: Mapping[str, Quantizer]) -> dict[str, Any]:
    """What ``config.json`` says of packed modules."""
    modules: dict[str, Any] = {}
    for output in coded:
        quantizer = quantizers[output.name]
        if isinstance(quantizer, TrellisPacked) and output.module is not None:
            spec: TrellisSpec = quantizer.spec(output.pieces[0].shape, output.name)
            modules[output.module] = replace(spec, experts=len(output.parts)).to_config()
    return {"trellis": {"format_version": FORMAT_VERSION, "modules": modules}, "model_file": MODEL_FILE}
