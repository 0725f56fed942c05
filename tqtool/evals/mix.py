"""KL of a mix that was never written: the lowest artifact in memory, with groups of the others in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tqtool.errors import UserError
from tqtool.evals.candidates import Candidates
from tqtool.evals.kl import KlReport, score_kl
from tqtool.evals.swaps import exchange
from tqtool.formats.sensitivity import Sensitivity
from tqtool.formats.teacher import TeacherDump
from tqtool.runtime.donor import Donor
from tqtool.runtime.load import load

Tick = Callable[[int], None]


def require_measured(candidates: Candidates, sensitivity: Sensitivity) -> None:
    """Raise UserError unless ``candidates`` are the artifacts that ``sensitivity`` was measured on."""
    measured = {candidate.manifest_sha256: candidate.bits for candidate in sensitivity.candidates}
    given = {artifact.manifest_sha256 for artifact in candidates.artifacts}
    for artifact in candidates.artifacts:
        if artifact.manifest_sha256 not in measured:
            raise UserError(f"{artifact.folder}: not one of the artifacts that were measured", hint="give those")
    for digest, bits in measured.items():
        if digest not in given:
            raise UserError(f"the {bits}-bit candidate is missing", hint="give all artifacts of the measurement")


def measure_mix(
    candidates: Candidates,
    bits: Mapping[str, int],
    dump: TeacherDump,
    tick: Tick = lambda windows: None,
    *,
    windows: int | None = None,
) -> KlReport:
    """Score the mix in which each module of ``bits`` has its bits, and the others the lowest.

    Memory: one dense model, and one module of another artifact.

    Raises:
        UserError: no candidate has the bits, or see ``score_kl``.
    """
    lowest, *others = candidates.artifacts
    loaded = load(lowest.folder, compute="expand")
    modules = dict(loaded.model.named_modules())
    donors = {artifact.setting.bits: Donor(artifact.folder) for artifact in others}
    for name, rate in bits.items():
        if rate == lowest.setting.bits:
            continue
        if rate not in donors:
            raise UserError(f"{name}: {rate} bits, of which there is no artifact")
        exchange(modules, {name: donors[rate].take(name, modules[name].weight.dtype)})
    return score_kl(loaded, dump, tick, windows=windows)
