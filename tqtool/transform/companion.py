"""The multi-token-prediction companion of a hybrid: a draft head that shares its trunk's residual stream.

It reads, end to end, the embedding of the next token and the trunk's hidden state, each through a norm of its own,
projects both to one vector, runs a layer of full attention like the trunk's and a final norm; the trunk's head makes
logits of that. So it has to be folded with its trunk's R1: both inputs arrive rotated, and the head reads in that
basis.

Source of names and wiring: mlx-vlm's ``qwen3_5_mtp``, in whose layout (no prefix, gains as they are) it is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tqtool.errors import SourceError, UserError
from tqtool.mathx.signs import require_seed
from tqtool.source.config import text_config
from tqtool.transform.claim import NORMS_AROUND_ZERO, read_layout
from tqtool.transform.families import Family, Slot
from tqtool.transform.folds import OnColumns, Op, RotateInput, RotateOutput, Rotation, ScaleInput, Shift
from tqtool.transform.layout import Geometry, Parameter, layer_parameters, read_geometry, require_complete
from tqtool.transform.nested import COMPANION, renamed_stack
from tqtool.transform.outputs import OutputTensor, TransformPlan
from tqtool.transform.rotation import FOLD_FLOAT32, GAIN_KEPT_NEUTRAL, NO_R2, NO_R3, NO_R4, R1_LANE, Recipe
from tqtool.transform.select import COMPANION_TYPE

Tap = Literal["post_norm", "pre_norm"]
"""Where the trunk's hidden state is taken: behind its final norm, as mlx-vlm and vLLM do, or before it."""
TAPS: tuple[Tap, ...] = ("post_norm", "pre_norm")
DEPTH_KEY = "mtp_num_hidden_layers"
DEDICATED_KEY = "mtp_use_dedicated_embeddings"
_STEM = "model."

FINAL_GAMMA_DROPPED = (
    "mtp-final-gamma-dropped: the companion's final gain is neutral: the trunk's head carries the trunk's own, through "
    "which drafts are read instead"
)
HIDDEN_SCALE = (
    "mtp-hidden-scale: the trunk's final gain, divided by its root mean square, is folded into fc; the norm before fc "
    "is taken of the hidden state without it, which leaves a factor of each token's own"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompanionSource:
    """A companion as it is found.

    Attributes:
        shapes: Shape of each of its tensors, by name in the source.
        depth: Number of its layers.
        gain_offset: 1 where its gains are stored around zero, else 0.
    """

    shapes: Mapping[str, tuple[int, ...]]
    depth: int = 1
    gain_offset: float = 0.0


def plan_companion(
    family: Family,
    trunk_shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    source: CompanionSource,
    *,
    seed: int | None,
    tap: Tap = "post_norm",
) -> TransformPlan:
    """Plan a companion beside its trunk.

    Args:
        family: Of the trunk.
        trunk_shapes: Shape of every tensor of the trunk's source.
        config: The trunk's config.json.
        source: The companion.
        seed: Of the trunk's rotation; None where the trunk is not rotated.
        tap: Where the hidden state is taken.

    Returns:
        A plan whose outputs have mlx-vlm's names. It reads the trunk's final gain by its name in the trunk's source.

    Raises:
        UserError: The family has no companion, or the seed is out of range.
        SourceError: A tensor is missing, left over, or has another shape than the trunk's config implies.
    """
    if not family.is_hybrid:
        raise UserError(f"model_type {family.model_type!r} has no multi-token-prediction companion that is known")
    places = {place_of(name): name for name in source.shapes}
    if len(places) != len(source.shapes):
        raise SourceError("the companion has one tensor in two spellings", hint="keep one of them")
    # A layer of full attention is what it has, whatever the trunk's layers are.
    text = {key: value for key, value in text_config(config).items() if key != "layer_types"}
    text |= {"num_hidden_layers": source.depth, "full_attention_interval": 1}
    geometry = read_geometry(family, text)
    inside = {_inside(place): source.shapes[name] for place, name in places.items()}
    parameters = tuple(_parameters(family, geometry, text, inside))
    spelled = {_inside(place): name for place, name in places.items()}
    before = _before(places)
    require_complete(
        f"a companion of model_type {family.model_type!r}",
        inside,
        parameters,
        (),
        lambda name: spelled.get(name) or before + (name.removeprefix(_STEM) if name.startswith(_STEM) else name),
    )
    named = [_placed(parameter, spelled, source.gain_offset) for parameter in parameters]
    updates = {"hidden_tap": tap}
    if seed is None:
        outputs = tuple(parameter.output() for parameter in named)
        return TransformPlan(id="identity", outputs=outputs, config_updates=updates)
    require_seed(seed)
    trunk = read_layout(family, trunk_shapes, config)
    final = next(parameter for parameter in trunk.parameters if parameter.slot is Slot.FINAL_NORM)
    folding = _Folding(
        recipe=_recipe(geometry, named, seed, source.gain_offset),
        tap=tap,
        trunk_gain=ScaleInput(gain=final.source_name, offset=trunk.gain_offset, is_unit=True),
    )
    deviations = (NO_R2, NO_R3, NO_R4, GAIN_KEPT_NEUTRAL, FOLD_FLOAT32, FINAL_GAMMA_DROPPED)
    return TransformPlan(
        id=f"rotation.{COMPANION_TYPE}",
        outputs=tuple(folding.fold(parameter) for parameter in named),
        seed=seed,
        deviations=(*deviations, HIDDEN_SCALE) if tap == "post_norm" else deviations,
        config_updates=updates,
    )


def place_of(name: str) -> str:
    """A companion tensor's name without what stands before and with ``mtp.``."""
    before, found, place = name.rpartition(COMPANION)
    return place if found and (not before or before.endswith(".")) else name


def _before(places: Mapping[str, str]) -> str:
    """What stands before the places in the source's names: nothing, ``mtp.`` or more."""
    return next((name.removesuffix(place) for place, name in places.items()), "")


def parse_tap(text: str) -> Tap:
    """``post`` or ``pre``, as ``--mtp-tap`` takes it. Raises UserError."""
    known: dict[str, Tap] = {"post": "post_norm", "pre": "pre_norm"}
    if text not in known:
        raise UserError(f"--mtp-tap {text!r} is unknown", hint=f"one of {', '.join(known)}")
    return known[text]


def _parameters(
    family: Family, geometry: Geometry, text: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Parameter]:
    hidden = geometry.hidden
    yield Parameter(name="fc.weight", shape=(hidden, 2 * hidden), slot=Slot.FUSE)
    yield Parameter(name="pre_fc_norm_embedding.weight", shape=(hidden,), slot=Slot.EMBEDDING_NORM)
    yield Parameter(name="pre_fc_norm_hidden.weight", shape=(hidden,), slot=Slot.HIDDEN_NORM)
    for layer in range(geometry.n_layers):
        yield from layer_parameters(family, geometry, text, shapes, layer)
    yield Parameter(name="norm.weight", shape=(hidden,), slot=Slot.FINAL_NORM)


def _inside(place: str) -> str:
    """The name by which ``layer_parameters`` goes."""
    return _STEM + place if place.startswith("layers.") else place


def _placed(parameter: Parameter, spelled: Mapping[str, str], offset: float) -> Parameter:
    """``parameter`` with its name in the artifact and its source's, its gain as it is."""
    name = parameter.name.removeprefix(_STEM)
    if parameter.stack is not None:
        stack = renamed_stack(parameter.stack, lambda inside: inside.removeprefix(_STEM), spelled)
        return replace(parameter, name=name, stack=stack)
    is_shifted = offset and parameter.slot in NORMS_AROUND_ZERO
    stored = (Shift(value=offset),) if is_shifted else parameter.stored
    return replace(parameter, name=name, source=spelled[parameter.name], stored=stored)


def _recipe(geometry: Geometry, parameters: list[Parameter], seed: int, offset: float) -> Recipe:
    folded = (Slot.ATTENTION_NORM, Slot.MLP_NORM, Slot.EMBEDDING_NORM, Slot.HIDDEN_NORM, Slot.FINAL_NORM)
    return Recipe(
        r1=Rotation(n=geometry.hidden, signs_lane=R1_LANE, seed=seed),
        head_dim=geometry.head_dim,
        value_width=geometry.n_kv_heads * geometry.head_dim,
        r2_seed=None,
        gain_offset=offset,
        neutral_gain=1.0,
        has_r2=False,
        norms={(p.layer, p.slot): p.source_name for p in parameters if p.slot in folded},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folding:
    """The folds of a companion: its layers' are a trunk's, ``fc`` has its own."""

    recipe: Recipe
    tap: Tap
    trunk_gain: ScaleInput

    def fold(self, parameter: Parameter) -> OutputTensor:
        """The parameter with its folds."""
        if parameter.slot is not Slot.FUSE:
            return self.recipe.fold(parameter)
        hidden, r1 = parameter.shape[0], self.recipe.r1
        own = [
            ScaleInput(gain=self.recipe.norms[None, slot], offset=self.recipe.gain_offset)
            for slot in (Slot.EMBEDDING_NORM, Slot.HIDDEN_NORM)
        ]
        embedding: list[ScaleInput | RotateInput] = [own[0], RotateInput(rotation=r1)]
        state: list[ScaleInput | RotateInput] = [own[1], RotateInput(rotation=r1)]
        if self.tap == "post_norm":
            state.insert(1, self.trunk_gain)
        ops: tuple[Op, ...] = (
            *(OnColumns(start=0, stop=hidden, fold=op) for op in embedding),
            *(OnColumns(start=hidden, stop=2 * hidden, fold=op) for op in state),
            RotateOutput(rotation=r1),
        )
        return replace(parameter.output(), ops=ops)
