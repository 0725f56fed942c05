"""``tqtool kmap``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tqtool.cli.sensitivity import ReferenceMode

HELP = """Spend a budget of bits where the measurement says they help most; write a k-map for trellis --k-map.

SENS is a file of tqtool sensitivity, OptiQ's sensitivity.json or EXL3's measurement.json. Single swaps do not add up:
with --artifact and --teacher the mix is assembled in memory and measured, and stands beside the prediction and beside
the best candidate within the budget.
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("kmap", help=HELP, short_help="Choose bits for each module under a budget.")(kmap)


def kmap(
    source: Annotated[Path, typer.Argument(metavar="SENS", help="Measured sensitivities.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.")],
    budget: Annotated[float, typer.Option("--budget", help="Mean bits of the codes over the measured weights.")],
    modules: Annotated[
        list[str] | None, typer.Option("--modules", help="Only those that a glob matches, not all; repeatable.")
    ] = None,
    reference: Annotated[
        ReferenceMode | None, typer.Option("--reference", help="Of an OptiQ file, which does not say; else detected.")
    ] = None,
    artifacts: Annotated[
        list[Path] | None,
        typer.Option("--artifact", help="Candidate that was measured: measure the mix; repeat for all."),
    ] = None,
    teacher: Annotated[Path | None, typer.Option("--teacher", help="Dump to measure the mix against.")] = None,
    windows: Annotated[int | None, typer.Option("--windows", "-n", help="Only the first N windows.")] = None,
    force: Annotated[bool, typer.Option("--force", "--overwrite", help="Replace OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Parse, allocate, measure, write, render."""
    from tqtool.artifact.output import check_writable, whole_file
    from tqtool.cli.render import emit_json, emit_line, emit_table, note, progress
    from tqtool.errors import UserError
    from tqtool.formats.kmap import encode_kmap
    from tqtool.formats.sensitivity_file import read_sensitivity
    from tqtool.pipeline.allocation import kmap_for

    if (teacher is None) != (not artifacts):
        raise UserError(
            "--artifact and --teacher belong together", hint="give all artifacts that were measured, or neither"
        )
    if windows is not None and teacher is None:
        raise UserError("--windows without --teacher does nothing")
    if out.exists() and not force:
        raise UserError(f"{out}: exists already", hint="give another name, or --force to replace it")
    check_writable(out)
    sensitivity = read_sensitivity(source, reference=None if reference is None else reference.value)
    for line in sensitivity.notes:
        note(f"note: {line}")
    mix = kmap_for(sensitivity, budget, modules or ("*",))
    for line in mix.doubts():
        note(f"note: {line}")
    report = {"budget": budget, "reference": sensitivity.reference, **mix.to_json()}
    if teacher is not None:
        from tqtool.evals.candidates import teacher_notes
        from tqtool.evals.mix import open_measured, score_mix
        from tqtool.formats.teacher import open_dump

        dump = open_dump(teacher)
        candidates = open_measured(artifacts or (), sensitivity)
        for line in teacher_notes(candidates, dump):
            note(f"note: {line}")
        with progress("kl", 2 * (windows or dump.info.windows), quiet=as_json) as advance:
            score = score_mix(
                candidates, mix.bits, budget, dump, lambda done: advance(done, "windows"), windows=windows
            )
        report |= score.to_json()
        if not score.is_worth_it:
            note(f"note: the mix is no better than all modules at {score.uniform_bits} bits")
    with whole_file(out) as (file, _):
        file.write(encode_kmap(mix.bits, report))
    if as_json:
        emit_json({"out": str(out), "k": dict(mix.bits), **report})
        return
    emit_table(("group", "bits"), [(" + ".join(group), bits) for group, bits in mix.groups])
    emit_line()
    for key, value in report.items():
        emit_line(f"{key.replace('_', ' ')}: {value}")
    emit_line(str(out))
