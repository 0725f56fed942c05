"""What each verb would do with a checkpoint, and what the results would weigh: plans and sizes, no arrays."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tqtool.errors import TqError
from tqtool.formats.dtypes import DType
from tqtool.pipeline.plan import Work, totals_of
from tqtool.pipeline.rules import DEFAULT_BITS, DEFAULT_GROUP
from tqtool.solve.quantizer import Quantizer
from tqtool.solve.rtn import AffineRtn, FloatStore
from tqtool.solve.trellis import TrellisOptions, TrellisPacked
from tqtool.source.checkpoint import Checkpoint
from tqtool.source.gguf.config import build_config, read_shape
from tqtool.source.gguf.families import TABLES, family_of, has_bias, map_tensors
from tqtool.source.gguf.reader import GgufFile
from tqtool.source.gguf.tokenizer import check_tokenizer
from tqtool.transform.plan import OutputTensor, Role, TransformPlan, plan_identity, plan_rotation

TRELLIS_K: Final = 3
AXES: Final = (1, 0)
LINEAR_ROLES: Final = frozenset({Role.Q, Role.K, Role.V, Role.O, Role.GATE, Role.UP, Role.DOWN})
EMBEDDING_BITS: Final = 8  # beside a trellis: the embedding is the head of a tied model and suffers most
_LAYER: Final = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbRow:
    """One verb: what it would do, or why it would refuse and what to do then."""

    verb: str
    possible: bool
    detail: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingRow:
    """Modules of one kind and what the trellis wastes on them; ``share`` is padding over weights."""

    pattern: str
    count: int
    shape: tuple[int, int]
    axis: int
    blocks: int
    padded_weights: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One form the checkpoint could take. Bytes; bits per weight of the source."""

    form: str
    tensor_bytes: int
    bits_per_weight: float
    convert_memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOutlook:
    """What happens to one source tensor."""

    role: str
    convert: str
    rotate: str
    trellis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Rows of the report that look ahead."""

    verbs: tuple[VerbRow, ...]
    tensors: Mapping[str, TensorOutlook] = field(default_factory=dict)
    padding: tuple[PaddingRow, ...] = ()
    estimates: tuple[Estimate, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    roles: frozenset[str] = frozenset()


def outlook(checkpoint: Checkpoint) -> Outlook:
    """The verbs' view of a float checkpoint."""
    shapes = checkpoint.shapes()
    try:
        identity = plan_identity(shapes, checkpoint.config)
    except TqError as error:
        refused = [_refused(verb, error) for verb in ("convert", "convert --rotate-weights", "trellis")]
        return Outlook(verbs=tuple(refused))
    rotation, rotation_row = _rotation(checkpoint)
    packed = {output.name: _packed(output) for output in identity.outputs}
    coded = {output.name: _coded(output) for output in identity.outputs}
    return Outlook(
        verbs=(
            VerbRow(verb="convert", possible=True, detail="folds nothing, casts every tensor to one type"),
            _convert_row(identity, packed),
            rotation_row,
            _trellis_row(identity),
        ),
        tensors=_tensor_rows(identity, rotation, packed),
        padding=_padding(identity),
        estimates=(
            _estimate("bf16", checkpoint, identity, lambda output: FloatStore(dtype=DType.BF16)),
            _estimate(f"affine{DEFAULT_BITS} g{DEFAULT_GROUP}", checkpoint, identity, lambda o: packed[o.name]),
            _estimate(
                f"trellis k{TRELLIS_K} linears, affine{EMBEDDING_BITS} g{DEFAULT_GROUP} embedding and head",
                checkpoint,
                identity,
                lambda o: coded[o.name],
            ),
        ),
    )


def quantized_outlook(evidence: str) -> Outlook:
    """The verbs' view of a checkpoint that is already quantized."""
    detail = f"already quantized: {evidence}"
    hint = "start from the full-precision model"
    rows = [VerbRow(verb=verb, possible=False, detail=detail, hint=hint) for verb in ("convert", "trellis")]
    return Outlook(verbs=(*rows, VerbRow(verb="generate, eval", possible=True, detail="loads it, or says why not")))


def gguf_outlook(file: GgufFile) -> Outlook:
    """What ``import-gguf`` would make of a file, or why it would not."""
    try:
        family = family_of(file)
        shape = read_shape(file)
        attention, mlp = (has_bias(file, group) for group in family.optional_biases or (("-",), ("-",)))
        config = build_config(file, shape, torch_dtype="bfloat16", biases=(attention, mlp))
        mapped = map_tensors(file, family, shape)
        check_tokenizer(file)
    except TqError as error:
        return Outlook(verbs=(_refused("import-gguf", error),), roles=TABLES)
    size = 2 * sum(item.source.n_elements for item in mapped)
    row = VerbRow(
        verb="import-gguf",
        possible=True,
        detail=f"writes {len(mapped)} tensors as {config['model_type']}, {size / 1e6:.1f} MB in bf16",
    )
    return Outlook(verbs=(row,), config=config, roles=TABLES)


def _refused(verb: str, error: TqError) -> VerbRow:
    return VerbRow(verb=verb, possible=False, detail=error.message, hint=error.hint)


def _rotation(checkpoint: Checkpoint) -> tuple[TransformPlan | None, VerbRow]:
    try:
        plan = plan_rotation(checkpoint.shapes(), checkpoint.config)
    except TqError as error:
        return None, _refused("convert --rotate-weights", error)
    folded = sum(1 for output in plan.outputs if output.ops)
    untied = len(plan.outputs) - len(checkpoint.tensors) + len(plan.dropped)
    detail = f"{plan.id}: folds {folded} of {len(plan.outputs)} tensors" + (", unties the head" if untied else "")
    return plan, VerbRow(verb="convert --rotate-weights", possible=True, detail=detail)


def _packed(output: OutputTensor) -> Quantizer:
    """What ``convert -q`` stores for ``output``."""
    if output.module is None or output.shape[-1] % DEFAULT_GROUP:
        return FloatStore(dtype=DType.BF16)
    return AffineRtn(bits=DEFAULT_BITS, group_size=DEFAULT_GROUP)


def _coded(output: OutputTensor) -> Quantizer:
    if output.role in LINEAR_ROLES and output.module is not None:
        return TrellisPacked(options=TrellisOptions(k=TRELLIS_K), axis=1)
    if output.module is not None and output.shape[-1] % DEFAULT_GROUP == 0:
        return AffineRtn(bits=EMBEDDING_BITS, group_size=DEFAULT_GROUP)
    return FloatStore(dtype=DType.BF16)


def _convert_row(plan: TransformPlan, packed: Mapping[str, Quantizer]) -> VerbRow:
    modules = [output for output in plan.outputs if output.module is not None]
    skipped = [output for output in modules if isinstance(packed[output.name], FloatStore)]
    why = Counter(f"{o.shape[-1]} inputs are no multiple of {DEFAULT_GROUP}" for o in skipped)
    others = Counter(output.role.value for output in plan.outputs if output.module is None)
    kept = ", ".join(f"{count} {role}" for role, count in others.items())
    detail = f"packs {len(modules) - len(skipped)} of {len(modules)} modules to {DEFAULT_BITS} bits in groups of "
    detail += f"{DEFAULT_GROUP}" + (f"; never packed: {kept}" if kept else "")
    detail += "".join(f"; {count} kept dense: {reason}" for reason, count in why.items())
    return VerbRow(verb="convert -q", possible=len(skipped) < len(modules), detail=detail)


def _trellis_row(plan: TransformPlan) -> VerbRow:
    linears = [output for output in plan.outputs if output.role in LINEAR_ROLES and output.module is not None]
    mlp = sum(1 for output in linears if output.role in (Role.GATE, Role.UP, Role.DOWN))
    if not linears:
        return VerbRow(verb="trellis", possible=False, detail="no linear layer of a known role")
    return VerbRow(
        verb="trellis", possible=True, detail=f"codes {len(linears)} linear layers ({mlp} of them in the MLPs)"
    )


def _tensor_rows(
    plan: TransformPlan, rotation: TransformPlan | None, packed: Mapping[str, Quantizer]
) -> dict[str, TensorOutlook]:
    folds: dict[str, str] = {}
    if rotation is not None:
        folds = {output.name: "  ".join(str(op) for op in output.ops) or "as is" for output in rotation.outputs}
    rows = {}
    for output in plan.outputs:
        is_linear = output.role in LINEAR_ROLES and output.module is not None
        spec = TrellisPacked(options=TrellisOptions(k=TRELLIS_K), axis=1).spec(output.shape, "") if is_linear else None
        rows[output.source] = TensorOutlook(
            role=output.role.value,
            convert=packed[output.name].label,
            rotate=folds.get(output.name, "" if rotation is None else "dropped"),
            trellis="" if spec is None else f"{spec.n_blocks:,} blocks" + (", padded" if spec.n_padding else ""),
        )
    for drop in plan.dropped:
        rows[drop.name] = TensorOutlook(role="dropped", convert=drop.reason, rotate="dropped", trellis="")
    return rows


def _padding(plan: TransformPlan) -> tuple[PaddingRow, ...]:
    """Padding of every kind of linear layer on both axes."""
    kinds = Counter(
        (_LAYER.sub(".*.", output.module), (output.shape[0], output.shape[1]))
        for output in plan.outputs
        if output.role in LINEAR_ROLES and output.module is not None
    )
    rows = []
    for (pattern, shape), count in kinds.items():
        for axis in AXES:
            spec = TrellisPacked(options=TrellisOptions(k=TRELLIS_K), axis=axis).spec(shape, pattern)
            rows.append(
                PaddingRow(
                    pattern=pattern,
                    count=count,
                    shape=shape,
                    axis=axis,
                    blocks=spec.n_blocks,
                    padded_weights=spec.n_padding,
                    share=spec.n_padding / (shape[0] * shape[1]),
                )
            )
    return tuple(rows)


def _estimate(
    form: str, checkpoint: Checkpoint, plan: TransformPlan, choose: Callable[[OutputTensor], Quantizer]
) -> Estimate:
    works = [_work(output, choose(output)) for output in plan.outputs]
    companions = sum(path.stat().st_size for path in checkpoint.files)
    totals = totals_of(checkpoint, works, n_shards=1, other_bytes=companions)
    return Estimate(
        form=form,
        tensor_bytes=totals.tensor_bytes,
        bits_per_weight=totals.bits_per_source_weight,
        convert_memory_bytes=totals.peak_memory_bytes,
        disk_bytes=totals.disk_bytes,
    )


def _work(output: OutputTensor, quantizer: Quantizer) -> Work:
    stored: Sequence[Any] = quantizer.outputs(output.name, output.shape)
    return Work(output=output, quantizer=quantizer, stored=tuple(stored))
