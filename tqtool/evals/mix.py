"""KL of a mix that was never written: the lowest artifact in memory, with groups of the others in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqtool.errors import UserError
from tqtool.evals.candidates import Candidates, open_candidates
from tqtool.evals.estimate import Estimate
from tqtool.evals.kl import score_kl
from tqtool.evals.swaps import exchange
from tqtool.formats.sensitivity import Sensitivity
from tqtool.formats.teacher import TeacherDump
from tqtool.runtime.donor import Donor
from tqtool.runtime.load import LoadedModel, load

HEAD = "lm_head"

Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixScore:
    """A mix beside the best candidate that spends no more: all measured modules at ``uniform_bits``."""

    windows: int
    kl: Estimate
    uniform_bits: int
    uniform_kl: Estimate

    @property
    def is_worth_it(self) -> bool:
        """Whether the mix is better than the candidate."""
        return self.kl.mean < self.uniform_kl.mean

    def to_json(self) -> dict[str, float | int | None]:
        """For the report of a k-map."""
        return {
            "measured_windows": self.windows,
            "measured_kl": self.kl.mean,
            "measured_kl_standard_error": self.kl.se,
            "uniform_bits": self.uniform_bits,
            "uniform_kl": self.uniform_kl.mean,
            "uniform_kl_standard_error": self.uniform_kl.se,
        }


def open_measured(folders: Sequence[Path], sensitivity: Sensitivity) -> Candidates:
    """The artifacts that ``sensitivity`` was measured on; UserError if ``folders`` are not exactly those."""
    measured = {candidate.manifest_sha256: candidate.bits for candidate in sensitivity.candidates}
    names = {name for group in sensitivity.groups for name in group.modules}
    candidates = open_candidates(folders, include_head=any(name.endswith(HEAD) for name in names))
    given = {artifact.manifest_sha256 for artifact in candidates.artifacts}
    for artifact in candidates.artifacts:
        if artifact.manifest_sha256 not in measured:
            raise UserError(f"{artifact.folder}: not one of the artifacts that were measured", hint="give those")
    for digest, bits in measured.items():
        if digest not in given:
            raise UserError(f"the {bits}-bit candidate is missing", hint="give all artifacts of the measurement")
    return candidates


def score_mix(
    candidates: Candidates,
    bits: Mapping[str, int],
    budget: float,
    dump: TeacherDump,
    tick: Tick = lambda windows: None,
    *,
    windows: int | None = None,
) -> MixScore:
    """Score the mix in which each module of ``bits`` has its bits and the others the lowest; ``tick`` as ``score_kl``.

    Memory: one dense model, and one module of another artifact.

    Raises:
        UserError: no candidate has the bits, or see ``score_kl``.
    """
    mix = score_kl(_assembled(candidates, bits), dump, tick, windows=windows)
    uniform = max(artifact.setting.bits for artifact in candidates.artifacts if artifact.setting.bits <= budget)
    alike = score_kl(_assembled(candidates, dict.fromkeys(bits, uniform)), dump, tick, windows=windows)
    return MixScore(windows=mix.windows, kl=mix.kl, uniform_bits=uniform, uniform_kl=alike.kl)


def _assembled(candidates: Candidates, bits: Mapping[str, int]) -> LoadedModel:
    lowest, *others = candidates.artifacts
    loaded = load(lowest.folder, compute="expand")
    modules = dict(loaded.model.named_modules())
    donors = {artifact.setting.bits: Donor(artifact.folder) for artifact in others}
    for name, rate in bits.items():
        if rate != lowest.setting.bits:
            exchange(modules, {name: donors[rate].take(name, modules[name].weight.dtype)})
    return loaded
