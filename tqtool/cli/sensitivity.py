"""``tqtool sensitivity``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tqtool.formats.sensitivity import Value

HELP = """Measure what each group of modules does to KL when it alone changes its rate.

The ARTIFACTs are the candidates: one model coded beforehand at one rate each, by trellis -k 2, 3, 4 or convert --bits
3, 4, 6, from one source with one transform. gate_proj and up_proj of a layer are one group; embedding and head are
held. An interrupted run is finished with --resume. The result is for tqtool kmap, trellis --k-map and convert
--sensitivity.
"""


class ReferenceMode(StrEnum):
    """What one group at a time is swapped in."""

    LOW = "low"
    HIGH = "high"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("sensitivity", help=HELP, short_help="Measure what the bits of each module do to KL.")(sensitivity)


def sensitivity(
    paths: Annotated[list[Path], typer.Argument(metavar="ARTIFACT... OUT", help="Candidates, then the file to write.")],
    teacher: Annotated[Path, typer.Option("--teacher", help="Dump made by tqtool teacher from the source.")],
    reference: Annotated[
        ReferenceMode, typer.Option("--reference", help="high: lower one group at a time; low: raise one.")
    ] = ReferenceMode.HIGH,
    windows: Annotated[int | None, typer.Option("--windows", "-n", help="Only the first N windows.")] = None,
    head: Annotated[bool, typer.Option("--head", help="Swap an untied head too.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Finish an interrupted run.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Parse, plan, measure, render."""
    from tqtool.cli.render import emit_json, emit_line, emit_table, note, progress
    from tqtool.errors import UserError
    from tqtool.evals.sensitivity import SensitivityRequest, measure_sensitivity, plan_sensitivity
    from tqtool.pipeline.preflight import readable_bytes

    *artifacts, out = paths
    if not artifacts:
        raise UserError("OUT is missing", hint="tqtool sensitivity ARTIFACT ARTIFACT OUT.json --teacher DUMP")
    job = plan_sensitivity(
        SensitivityRequest(
            artifacts=tuple(artifacts),
            teacher=teacher,
            out=out,
            reference=reference.value,
            windows=windows,
            include_head=head,
            resume=resume,
        )
    )
    facts = {
        "groups": len(job.candidates.groups),
        "swaps": job.swaps,
        "candidates": [str(artifact.setting) for artifact in job.candidates.artifacts],
        "protected": list(job.candidates.protected),
        "peak_memory_bytes": job.peak_memory_bytes,
    }
    for line in job.notes:
        note(f"note: {line}")
    if dry_run:
        size = f"{facts['groups']} groups, {job.swaps} swaps, about {readable_bytes(job.peak_memory_bytes)} of memory"
        emit_json(facts) if as_json else emit_line(f"{out}: would hold {size}")
        return
    for module in job.candidates.protected:
        note(f"note: {module} is not swapped: it stays {job.reference.records[module].quantizer}")
    with progress("sensitivity", job.swaps, quiet=as_json) as advance:
        found = measure_sensitivity(job, lambda swaps: advance(swaps, "swaps"))
    if as_json:
        emit_json({"out": str(out), **facts, **found.model_dump(mode="json", exclude={"groups", "candidates"})})
        return
    word = "gain" if found.reference == "low" else "loss"
    columns = [bits for bits in found.candidate_bits if bits != found.reference_bits]
    rows = [
        (" + ".join(group.modules), *(_with_error(group.values[str(bits)]) for bits in columns))
        for group in found.groups
    ]
    emit_table(("group", *(f"{word} at {bits}" for bits in columns)), rows)
    kl = found.reference_kl
    assert kl is not None, "measured"
    emit_line(f"{out}: reference {found.reference}, all at {found.reference_bits} bits: KL {kl.mean:.5f}")


def _with_error(value: Value) -> str:
    error = "" if value.standard_error is None else f" ± {value.standard_error:.5f}"
    return f"{value.mean:+.5f}{error}"
