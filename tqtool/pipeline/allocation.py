"""Measured sensitivities and a budget → bits for every module."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import pairwise
from typing import Any

from tqtool.errors import UserError
from tqtool.formats.kmap import RATES
from tqtool.formats.sensitivity import Group, Sensitivity
from tqtool.mathx.allocation import Option, allocate
from tqtool.source.checkpoint import Checkpoint
from tqtool.source.fingerprint import fingerprint
from tqtool.transform.plan import TransformPlan

Cost = Callable[[Group, int], int]
"""Bits that a group takes at a candidate's nominal bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What each measured module gets, and what single swaps say it does.

    Attributes:
        groups: Modules that take one rate, and its nominal bits, in the order of the file.
        mean_bits: Nominal bits per weight over them.
        bits_per_weight: All that is stored for them, per weight; None where the file does not say.
        change: Sum of the measured changes of KL, from the reference on: a prediction, for swaps do not add up.
        kl: The reference's KL and ``change``; None where the file has none.
        gap: No mix within the budget has a predicted KL lower by more than this.
        noisy: Groups of which some candidate has more bits and a higher KL than another.
        is_slack: Every group has the highest rate there is, and bits of the budget are left.
        counts: Nominal bits → groups.
    """

    groups: tuple[tuple[tuple[str, ...], int], ...]
    mean_bits: float
    bits_per_weight: float | None
    change: float
    kl: float | None
    gap: float
    noisy: int
    is_slack: bool
    counts: Mapping[int, int]

    @property
    def bits(self) -> dict[str, int]:
        """Module → nominal bits."""
        return {name: bits for modules, bits in self.groups for name in modules}

    def to_json(self) -> dict[str, Any]:
        """The prediction, for a report."""
        return {
            "mean_bits": self.mean_bits,
            "bits_per_weight": self.bits_per_weight,
            "predicted_change": self.change,
            "predicted_kl": self.kl,
            "optimality_gap": self.gap,
            "noisy_groups": self.noisy,
            "groups_by_bits": {str(bits): count for bits, count in self.counts.items()},
        }

    def notes(self, model: str | None) -> tuple[str, ...]:
        """What a plan says of it; ``model`` is the one that was measured."""
        counts = ", ".join(f"{count} at {bits}" for bits, count in self.counts.items() if count)
        predicted = f"change of KL {self.change:+.4f}" if self.kl is None else f"KL {self.kl:.4f}"
        return (
            f"bits by sensitivities measured on {model}: {counts} bits; swaps add up to {predicted}",
            *self.doubts(),
        )

    def doubts(self) -> tuple[str, ...]:
        """Why the sum of the swaps cannot be true, if it cannot; that the budget asks for more than there is."""
        found = []
        if self.is_slack:
            found.append(
                f"every measured module has the highest candidate, {max(self.counts)} bits: the budget is not spent"
            )
        if self.kl is not None and self.kl < 0:
            found.append(
                "the swaps add up to more than the reference's whole KL: it is too far from the teacher to tell "
                "modules apart; measure with --reference high, or with higher candidates"
            )
        return tuple(found)


def basis_notes(
    sensitivity: Sensitivity, checkpoint: Checkpoint, transform: TransformPlan, *, is_trellis: bool
) -> tuple[str, ...]:
    """What was measured differs from the job in a way that one may want: other weights, another way of coding.

    Raises:
        UserError: it was measured in another basis than ``transform``; a file without one passes.
    """
    measured = [(record.id, record.seed) for record in sensitivity.transforms]
    if measured and measured != [(transform.id, transform.seed)]:
        found = ", ".join(name if seed is None else f"{name} with seed {seed}" for name, seed in measured)
        here = transform.id if transform.seed is None else f"{transform.id} with seed {transform.seed}"
        raise UserError(
            f"sensitivity: measured under {found}, the job is {here}",
            hint="measure artifacts of this rotation and seed, or give theirs (--rotate-weights, --rotation-seed)",
        )
    notes = []
    there = sensitivity.source_sample_sha256
    if there is not None and there != (here := fingerprint(checkpoint)):
        notes.append(
            f"sensitivity: measured on other weights than {checkpoint.path.name}: "
            f"{sensitivity.base_model}, sample {there[:12]}, found {here[:12]}"
        )
    modes = sorted({candidate.mode for candidate in sensitivity.candidates} - {"trellis"})
    if is_trellis and modes:
        notes.append(f"sensitivity: measured on {', '.join(modes)} candidates, spent on the trellis")
    return tuple(notes)


def mix_for(
    sensitivity: Sensitivity, groups: Sequence[Group], budget: Fraction, cost: Cost, what: str, rates: Sequence[int]
) -> Mix:
    """The mix of ``groups`` at ``rates``, some of the candidates' bits, that takes at most ``budget`` bits in all.

    Raises:
        UserError: the lowest rates already take more; ``what`` names the budget in the message.
    """
    curves = [
        [Option(bits=cost(group, bits), loss=sensitivity.change(group, bits)) for bits in rates] for group in groups
    ]
    found = allocate(curves, math.floor(budget))
    if found is None:
        least, weights = sum(curve[0].bits for curve in curves), sum(group.parameters for group in groups)
        raise UserError(
            f"{what}: leaves {float(budget / weights):.4f} bits for each measured weight, "
            f"{rates[0]}-bit candidates take {least / weights:.4f}",
            hint="raise it, or measure lower candidates",
        )
    chosen = [rates[index] for index in found.chosen]
    weights = sum(group.parameters for group in groups)
    stored = [group.bits_per_weight.get(str(bits)) for group, bits in zip(groups, chosen, strict=True)]
    reference = sensitivity.reference_kl
    return Mix(
        groups=tuple((tuple(group.modules), bits) for group, bits in zip(groups, chosen, strict=True)),
        mean_bits=sum(bits * group.parameters for group, bits in zip(groups, chosen, strict=True)) / weights,
        bits_per_weight=None
        if None in stored
        else sum((rate or 0.0) * group.parameters for group, rate in zip(groups, stored, strict=True)) / weights,
        change=float(found.loss),
        kl=None if reference is None else reference.mean + float(found.loss),
        gap=float(found.loss - found.bound),
        noisy=sum(_rises(curve) for curve in curves),
        is_slack=set(chosen) == {rates[-1]} and sum(curve[-1].bits for curve in curves) < budget,
        counts={bits: chosen.count(bits) for bits in rates},
    )


def kmap_for(sensitivity: Sensitivity, budget: float, modules: Sequence[str] = ("*",)) -> Mix:
    """The mix whose mean nominal bits over the groups that ``modules`` (globs) match is at most ``budget``.

    Raises:
        UserError: a glob matches no measured module, or half of a tied group; the budget is too low.
    """
    groups = _matching(sensitivity, modules)
    total = exact(budget, "--budget") * sum(group.parameters for group in groups)
    return mix_for(sensitivity, groups, total, nominal, f"--budget {budget}", _trellis_rates(sensitivity))


def coded_mix(sensitivity: Sensitivity, budget: float, weights: Mapping[str, int], default: int) -> Mix:
    """The mix of the coded modules whose mean nominal bits over all ``weights`` (module → count) is at most ``budget``.

    Modules that were not measured keep ``default`` and count.

    Raises:
        UserError: a measured module is not coded or has other weights; the budget is too low.
    """
    for group in sensitivity.groups:
        for name, count in zip(group.modules, group.param_counts, strict=True):
            if weights.get(name) != count:
                found = f"has {weights[name]} weights here, {count} there" if name in weights else "is not coded here"
                raise UserError(f"sensitivity: {name} {found}", hint="measure this model, and these --modules")
    measured = {name for group in sensitivity.groups for name in group.modules}
    fixed = sum(default * count for name, count in weights.items() if name not in measured)
    total = exact(budget, "--k-budget") * sum(weights.values()) - fixed
    rates = _trellis_rates(sensitivity)
    return mix_for(sensitivity, sensitivity.groups, total, nominal, f"--k-budget {budget}", rates)


def _trellis_rates(sensitivity: Sensitivity) -> list[int]:
    """Candidates' bits that the trellis has; UserError if there are fewer than two."""
    found = [bits for bits in sensitivity.candidate_bits if bits in RATES]
    if len(found) < 2:
        raise UserError(
            f"candidates of {sensitivity.candidate_bits} bits: the trellis has {', '.join(map(str, RATES))}"
        )
    return found


def nominal(group: Group, bits: int) -> int:
    """Codes alone."""
    return bits * group.parameters


def exact(budget: float, flag: str) -> Fraction:
    """``budget`` as it was written: 3.3 is 33/10, not the float next to it."""
    if not math.isfinite(budget) or budget <= 0:
        raise UserError(f"{flag} {budget}: expected a positive number of bits per weight")
    return Fraction(repr(budget))


def _matching(sensitivity: Sensitivity, modules: Sequence[str]) -> list[Group]:
    names = [name for group in sensitivity.groups for name in group.modules]
    for glob in modules:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UserError(f"--modules {glob!r} matches no measured module", hint=f"one is {names[0]}")
    wanted = {name for name in names if any(fnmatchcase(name, glob) for glob in modules)}
    for group in sensitivity.groups:
        if 0 < len(wanted.intersection(group.modules)) < len(group.modules):
            raise UserError(f"--modules: {', '.join(group.modules)} take one rate together", hint="match all or none")
    return [group for group in sensitivity.groups if wanted.issuperset(group.modules)]


def _rises(curve: Sequence[Option]) -> bool:
    return any(high.loss > low.loss for low, high in pairwise(curve))
