"""The rotation recipe: untie, fold every norm gain, R1 on the residual stream, R2 inside each attention head.

Order and axes follow from two facts. RMSNorm commutes with a rotation only while its gain is neutral, so the gains
move into the readers first; and softmax weights mix tokens, not channels, so a per-head rotation of v cancels in
o_proj, also when several query heads share a kv head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tqtool.mathx.hadamard import require_size
from tqtool.mathx.signs import require_seed
from tqtool.transform.families import EMBEDDING, FINAL_NORM, HEAD, Layout, Parameter, Slot, read_layout
from tqtool.transform.ops import (
    Fill,
    Op,
    OutputTensor,
    RotateHeads,
    RotateInput,
    RotateOutput,
    Rotation,
    ScaleInput,
    TransformPlan,
)
from tqtool.transform.select import AUTO, select_rotation

DEFAULT_SEED = 42
R1_LANE = 0  # layer i's R2, when signed, takes lane i + 1

# Where the recipe departs from QuaRot (2404.00456) and SpinQuant (2405.16406); kept with every rotated artifact.
NO_MEAN_CENTRING = "no-mean-centring: embedding rows are not centred: with RMSNorm that would change the function"
NO_R3 = "no-r3: queries and keys are not rotated after RoPE: that serves a quantized KV cache, online"
NO_R4 = "no-r4: no Hadamard on down_proj's input: its other half would have to run online"
R2_PER_HEAD = "r2-per-head: one head_dim rotation per head in v_proj and o_proj; a full-width one needs an online half"
GAIN_KEPT_NEUTRAL = "gain-kept-neutral: each folded norm keeps its module and eps, its gain set to the neutral value"
FOLD_FLOAT32 = (
    "fold-float32: folds are computed in float32, not float64: rounding to bfloat16 afterwards is 2^16 times coarser"
)
DEVIATIONS = (NO_MEAN_CENTRING, NO_R3, NO_R4, R2_PER_HEAD, GAIN_KEPT_NEUTRAL, FOLD_FLOAT32)


def plan_rotation(
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    *,
    seed: int = DEFAULT_SEED,
    transform: str = AUTO,
    signed_r2: bool = False,
) -> TransformPlan:
    """Plan the folds of a rotated checkpoint.

    Args:
        shapes: Shape of every source tensor, by name.
        config: Parsed config.json.
        seed: Seed of the sign streams, 0 … 2**32 - 1.
        transform: ``"rotation.auto"`` or ``"rotation.<family>"``.
        signed_r2: Give layer i's R2 the signs of lane i + 1; by default R2 is the plain Hadamard.

    Returns:
        A plan whose outputs and dropped tensors claim every source tensor; the head is always its own tensor.

    Raises:
        UserError: The architecture is unknown or cannot be rotated, the transform does not fit it, no Hadamard
            matrix of order hidden_size or head_dim can be built, or the seed is out of range.
        SourceError: A tensor is missing, left over, or has another shape than config.json implies.
    """
    family = select_rotation(config, transform)
    layout = read_layout(family, shapes, config)
    geometry = layout.geometry
    require_seed(seed)
    require_size(geometry.hidden, what="hidden_size")
    require_size(geometry.head_dim, what="head_dim")
    r1 = Rotation(n=geometry.hidden, signs_lane=R1_LANE, seed=seed)
    outputs = [
        _folded(layout, parameter, r1, _head_rotation(layout, parameter, seed if signed_r2 else None))
        for parameter in layout.parameters
    ]
    updates = dict(layout.config_updates)
    if layout.is_tied:
        outputs.append(_untied_head(layout, r1))
        updates |= _untied_config(config)
    return TransformPlan(
        id=f"rotation.{family.model_type}",
        outputs=tuple(outputs),
        seed=seed,
        deviations=DEVIATIONS,
        config_updates=updates,
        dropped=layout.dropped,
    )


def _folded(layout: Layout, parameter: Parameter, r1: Rotation, r2: Rotation) -> OutputTensor:
    plain = parameter.output()
    ops = tuple(_bias_ops(parameter, r1, r2) if parameter.is_bias else _weight_ops(layout, parameter, r1, r2))
    return OutputTensor(
        name=plain.name, source=plain.source, shape=plain.shape, ops=ops, module=plain.module, role=plain.role
    )


def _weight_ops(layout: Layout, parameter: Parameter, r1: Rotation, r2: Rotation) -> Iterator[Op]:
    offset = layout.family.gain_offset
    match parameter.slot:
        case Slot.EMBEDDING:
            yield RotateInput(rotation=r1)  # a row of the table is a residual vector
        case Slot.HEAD:
            yield ScaleInput(gain=FINAL_NORM, offset=offset)
            yield RotateInput(rotation=r1)
        case Slot.Q | Slot.K | Slot.V:
            yield ScaleInput(gain=_norm_name(layout, parameter.layer, Slot.ATTENTION_NORM), offset=offset)
            yield RotateInput(rotation=r1)
            if parameter.slot is Slot.V:
                yield RotateHeads(rotation=r2, axis="output")
        case Slot.GATE | Slot.UP:
            yield ScaleInput(gain=_norm_name(layout, parameter.layer, Slot.MLP_NORM), offset=offset)
            yield RotateInput(rotation=r1)
        case Slot.O:
            yield RotateOutput(rotation=r1)
            yield RotateHeads(rotation=r2, axis="input")
        case Slot.DOWN:
            yield RotateOutput(rotation=r1)
        case Slot.ATTENTION_NORM | Slot.MLP_NORM | Slot.FINAL_NORM:
            yield Fill(value=1.0 - offset)
        case Slot.INNER_NORM:
            pass  # acts in head space, after the projection


def _bias_ops(parameter: Parameter, r1: Rotation, r2: Rotation) -> Iterator[Op]:
    # A bias lives on the output, so input-side folds never touch it.
    match parameter.slot:
        case Slot.O | Slot.DOWN:
            yield RotateOutput(rotation=r1)
        case Slot.V:
            yield RotateHeads(rotation=r2, axis="output")
        case _:
            pass


def _head_rotation(layout: Layout, parameter: Parameter, seed: int | None) -> Rotation:
    if seed is None or parameter.layer is None:
        return Rotation(n=layout.geometry.head_dim)
    return Rotation(n=layout.geometry.head_dim, signs_lane=parameter.layer + 1, seed=seed)


def _norm_name(layout: Layout, layer: int | None, slot: Slot) -> str:
    return next(p.name for p in layout.parameters if p.layer == layer and p.slot is slot)


def _untied_head(layout: Layout, r1: Rotation) -> OutputTensor:
    return OutputTensor(
        name=HEAD,
        source=EMBEDDING,
        shape=(layout.geometry.vocab, layout.geometry.hidden),
        ops=(ScaleInput(gain=FINAL_NORM, offset=layout.family.gain_offset), RotateInput(rotation=r1)),
        module=HEAD.removesuffix(".weight"),
        role=Slot.HEAD.role,
    )


def _untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    updates: dict[str, Any] = {"tie_word_embeddings": False}
    if isinstance(config.get("text_config"), Mapping):
        updates["text_config"] = {"tie_word_embeddings": False}
    return updates
