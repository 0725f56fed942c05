"""``convert --target-bpw``: affine bits by measured sensitivity, under what an artifact truly stores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tqtool.errors import UserError
from tqtool.formats.dtypes import DType
from tqtool.formats.sensitivity import Group, Sensitivity
from tqtool.pipeline.allocation import Mix, exact, mix_for
from tqtool.pipeline.rules import MODES, Choices, Packed, Rule, matching_rule
from tqtool.solve.quantizer import Quantizer
from tqtool.solve.rtn import AffineRtn
from tqtool.transform.plan import OutputTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineMix:
    """The mix, the rules that make it, and what all packed modules then store a weight."""

    mix: Mix
    rules: tuple[Rule, ...]
    stored_bpw: float

    def notes(self, model: str | None, target: float) -> tuple[str, ...]:
        """What a plan says of it; ``model`` is the one that was measured."""
        return (
            f"all packed modules together: {self.stored_bpw:.4f} bits a weight, {target} asked for",
            *self.mix.notes(model),
        )


def candidate_packings(sensitivity: Sensitivity) -> dict[int, Packed]:
    """Bits → packing of each candidate; UserError if one is none that ``convert`` writes."""
    found = {}
    for candidate in sensitivity.candidates:
        mode = next((known for known in MODES if known == candidate.mode), None)
        if mode is None or candidate.group_size is None:
            raise UserError(
                f"sensitivity: the {candidate.bits}-bit candidate is {candidate.mode}, which convert does not write",
                hint="tqtool trellis --k-map takes measurements of trellis artifacts",
            )
        found[candidate.bits] = Packed(bits=candidate.bits, group_size=candidate.group_size, mode=mode)
    return found


def affine_mix(
    sensitivity: Sensitivity,
    target_bpw: float,
    *,
    outputs: Sequence[OutputTensor],
    choices: Choices,
    rules: Sequence[Rule],
    dtype_of: Callable[[OutputTensor], DType],
) -> AffineMix:
    """Bits for the measured modules, so that all packed modules together store at most ``target_bpw`` a weight.

    Scales and biases count, and so do packed modules that were not measured or that a rule decides; dense modules,
    norms and biases of layers do not.

    Args:
        sensitivity: Measured on affine candidates.
        target_bpw: Bits per weight.
        outputs: All output tensors of the plan.
        choices: What is packed how without the mix.
        rules: The user's, which win over the mix.
        dtype_of: Dtype of scales, per tensor.

    Raises:
        UserError: a measured module is not in the model or has other weights; the target is too low.
    """
    packings = candidate_packings(sensitivity)
    modules = {output.module: output for output in outputs if output.module is not None}
    _require_same(sensitivity, modules)
    free = [
        group
        for group in sensitivity.groups
        if all(matching_rule(modules[name], rules) is None for name in group.modules)
    ]
    if not free:
        raise UserError("the rules decide every measured module", hint="leave --target-bpw out, or narrow the rules")
    taken = {name for group in free for name in group.modules}
    packed = [output for name, output in modules.items() if name in taken or _is_packed(choices.choose(output))]
    fixed = sum(_stored_bits(output, choices.choose(output)) for output in packed if output.module not in taken)

    def cost(group: Group, bits: int) -> int:
        packing = packings[bits]
        return sum(_stored_bits(modules[name], _quantizer(packing, dtype_of(modules[name]))) for name in group.modules)

    weights = sum(math.prod(output.shape) for output in packed)
    total = exact(target_bpw, "--target-bpw") * weights - fixed
    mix = mix_for(sensitivity, free, total, cost, f"--target-bpw {target_bpw}", list(packings))
    rates = dict(mix.groups)
    spent = fixed + sum(cost(group, rates[tuple(group.modules)]) for group in free)
    return AffineMix(
        mix=mix,
        rules=tuple(_rule(name, packings[bits]) for name, bits in mix.bits.items()),
        stored_bpw=spent / weights,
    )


def _require_same(sensitivity: Sensitivity, modules: dict[str, OutputTensor]) -> None:
    for group in sensitivity.groups:
        for name, count in zip(group.modules, group.param_counts, strict=True):
            if name not in modules or math.prod(modules[name].shape) != count:
                raise UserError(
                    f"sensitivity: {name} with {count} weights is not in this model", hint="measure this one"
                )


def _rule(module: str, packing: Packed) -> Rule:
    text = f"{module}=bits:{packing.bits},group:{packing.group_size},mode:{packing.mode}"
    return Rule(glob=module, setting=packing, text=text)


def _quantizer(packing: Packed, dtype: DType) -> AffineRtn:
    return AffineRtn(bits=packing.bits, group_size=packing.group_size, mode=packing.mode, dtype=dtype)


def _is_packed(quantizer: Quantizer) -> bool:
    return isinstance(quantizer.config_entry(), dict)


def _stored_bits(output: OutputTensor, quantizer: Quantizer) -> int:
    return 8 * sum(stored.nbytes for stored in quantizer.outputs(output.name, output.shape))
