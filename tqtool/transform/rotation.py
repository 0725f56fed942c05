"""The rotation recipe: untie, fold every norm gain, R1 on the residual stream, R2 inside each attention head.

Order and axes follow from two facts. RMSNorm commutes with a rotation only while its gain is neutral, so the gains
move into the readers first; and softmax weights mix tokens, not channels, so a per-head rotation of v cancels in
o_proj, also when several query heads share a kv head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tqtool.mathx.hadamard import require_size
from tqtool.mathx.signs import require_seed
from tqtool.transform.claim import read_layout
from tqtool.transform.families import Slot
from tqtool.transform.folds import Fill, OnRows, Op, RotateHeads, RotateInput, RotateOutput, Rotation, ScaleInput
from tqtool.transform.layout import HEAD, Layout, Parameter
from tqtool.transform.outputs import OutputTensor, TransformPlan
from tqtool.transform.select import AUTO, select_rotation

DEFAULT_SEED = 42
R1_LANE = 0  # layer i's R2, when signed, takes lane i + 1
_FOLDED_NORMS = (
    *(Slot.ATTENTION_NORM, Slot.MLP_NORM, Slot.FINAL_NORM),
    *(Slot.EMBEDDING_NORM, Slot.HIDDEN_NORM),  # of a companion
)
_READERS = {
    **dict.fromkeys((Slot.Q, Slot.K, Slot.V, Slot.QKV, Slot.LINEAR_IN, Slot.RATE), Slot.ATTENTION_NORM),
    **dict.fromkeys((Slot.GATE, Slot.UP, Slot.GATE_UP, Slot.ROUTER), Slot.MLP_NORM),
    Slot.HEAD: Slot.FINAL_NORM,
}
"""Who reads the residual stream, and through which norm. What acts inside a head, a recurrence or a tower is no one."""
_WRITERS = frozenset({Slot.O, Slot.DOWN, Slot.LINEAR_OUT, Slot.TOWER_OUT})

# Where the recipe departs from QuaRot (2404.00456) and SpinQuant (2405.16406); kept with every rotated artifact.
NO_MEAN_CENTRING = "no-mean-centring: embedding rows are not centred: with RMSNorm that would change the function"
NO_R3 = "no-r3: queries and keys are not rotated after RoPE: that serves a quantized KV cache, online"
NO_R4 = "no-r4: no Hadamard on down_proj's input: its other half would have to run online"
R2_PER_HEAD = "r2-per-head: one head_dim rotation per head in v_proj and o_proj; a full-width one needs an online half"
GAIN_KEPT_NEUTRAL = "gain-kept-neutral: each folded norm keeps its module and eps, its gain set to the neutral value"
FOLD_FLOAT32 = (
    "fold-float32: folds are computed in float32, not float64: rounding to bfloat16 afterwards is 2^16 times coarser"
)
NO_R2 = "no-r2: attention's output is gated channel by channel inside each head, and no rotation passes through a gate"
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
    if not family.is_hybrid:
        require_size(geometry.head_dim, what="head_dim")
    recipe = Recipe(
        r1=Rotation(n=geometry.hidden, signs_lane=R1_LANE, seed=seed),
        head_dim=geometry.head_dim,
        value_width=geometry.n_kv_heads * geometry.head_dim,
        r2_seed=seed if signed_r2 else None,
        gain_offset=layout.gain_offset,
        neutral_gain=layout.neutral_gain,
        has_r2=not family.is_hybrid,
        norms={(p.layer, p.slot): p.source_name for p in layout.parameters if p.slot in _FOLDED_NORMS},
    )
    outputs = [recipe.fold(parameter) for parameter in layout.parameters]
    updates = dict(layout.config_updates)
    if layout.is_tied:
        outputs.append(recipe.untied_head(layout))
        updates |= _untied_config(config)
    return TransformPlan(
        id=f"rotation.{family.model_type}",
        outputs=tuple(outputs),
        seed=seed,
        deviations=DEVIATIONS if not family.is_hybrid else (*(d for d in DEVIATIONS if d != R2_PER_HEAD), NO_R2),
        config_updates=updates,
        dropped=layout.dropped,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The folds of one model.

    Attributes:
        r1: Residual rotation.
        head_dim: Side of every R2.
        value_width: Rows of v, ``n_kv_heads · head_dim``.
        r2_seed: Seed of R2's signs; None for the plain Hadamard.
        gain_offset: 1 where the source stores gains around zero, else 0.
        neutral_gain: What a folded norm's gain becomes.
        has_r2: Whether heads are rotated.
        norms: Source name of each folded norm, by layer (None for the final one) and slot.
    """

    r1: Rotation
    head_dim: int
    value_width: int
    r2_seed: int | None
    gain_offset: float
    neutral_gain: float
    has_r2: bool
    norms: Mapping[tuple[int | None, Slot], str]

    def fold(self, parameter: Parameter) -> OutputTensor:
        """The parameter with its folds."""
        ops = tuple(self._bias_ops(parameter) if parameter.is_bias else self._weight_ops(parameter))
        output = parameter.output()
        if output.parts:  # every expert reads and writes the one residual stream
            return replace(output, parts=tuple(replace(part, ops=ops) for part in output.parts))
        return replace(output, ops=ops if ops and isinstance(ops[-1], Fill) else (*parameter.stored, *ops))

    def untied_head(self, layout: Layout) -> OutputTensor:
        """A head of its own, made from the embedding: it reads through the final gain, the embedding does not."""
        shape = (layout.geometry.vocab, layout.geometry.hidden)
        table = next(p for p in layout.parameters if p.slot is Slot.EMBEDDING)
        return self.fold(Parameter(name=layout.prefix + HEAD, shape=shape, slot=Slot.HEAD, source=table.source_name))

    def _weight_ops(self, parameter: Parameter) -> Iterator[Op]:
        slot = parameter.slot
        if slot is Slot.EMBEDDING:
            yield RotateInput(rotation=self.r1)  # a row of the table is a residual vector
        if slot in _READERS:
            # The gain first: it acts on the channels of the old basis.
            norm = self.norms[None if slot is Slot.HEAD else parameter.layer, _READERS[slot]]
            yield ScaleInput(gain=norm, offset=self.gain_offset)
            yield RotateInput(rotation=self.r1)
        if slot in _WRITERS:
            yield RotateOutput(rotation=self.r1)
        if slot in _FOLDED_NORMS:
            yield Fill(value=self.neutral_gain)
        if self.has_r2 and slot is Slot.O:
            yield RotateHeads(rotation=self._r2(parameter.layer), axis="input")
        yield from self._value_ops(parameter)

    def _bias_ops(self, parameter: Parameter) -> Iterator[Op]:
        # A bias lives on the output, so input-side folds never touch it.
        if parameter.slot in _WRITERS:
            yield RotateOutput(rotation=self.r1)
        yield from self._value_ops(parameter)

    def _value_ops(self, parameter: Parameter) -> Iterator[Op]:
        """R2 on what makes the values of attention, weight or bias."""
        if self.has_r2 and parameter.slot is Slot.V:
            yield RotateHeads(rotation=self._r2(parameter.layer), axis="output")
        elif self.has_r2 and parameter.slot is Slot.QKV:
            yield self._values_of(parameter)

    def _values_of(self, parameter: Parameter) -> OnRows:
        """R2 on the last rows of a fused qkv: those of q and k must stay as they are, for the rotary positions."""
        rows = parameter.shape[0]
        fold = RotateHeads(rotation=self._r2(parameter.layer), axis="output")
        return OnRows(start=rows - self.value_width, stop=rows, fold=fold)

    def _r2(self, layer: int | None) -> Rotation:
        if self.r2_seed is None or layer is None:
            return Rotation(n=self.head_dim)
        return Rotation(n=self.head_dim, signs_lane=layer + 1, seed=self.r2_seed)


def _untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    updates: dict[str, Any] = {"tie_word_embeddings": False}
    if isinstance(config.get("text_config"), Mapping):
        updates["text_config"] = {"tie_word_embeddings": False}
    return updates
