"""``tqtool teacher``: dump what a model says at every position of a text."""

from __future__ import annotations

from pathlib import Path

import typer

from tqtool.cli.render import emit_json, emit_line, note, progress


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command()
    def teacher(
        model: str = typer.Argument(..., metavar="SRC", help="The reference model: folder or hub id."),
        out: Path = typer.Argument(..., metavar="OUT", help="File to write (safetensors)."),
        text: Path = typer.Option(..., "--text", help="UTF-8 text to score."),
        windows: int = typer.Option(32, "--windows", "-n", help="Windows, one behind the other."),
        skip: int = typer.Option(0, "--skip", help="Windows passed over first: those that something else reads."),
        context: int = typer.Option(512, "--context", "-c", help="Tokens of a window."),
        top: int = typer.Option(2048, "--top", help="Logits kept per position; the whole vocabulary if smaller."),
        force: bool = typer.Option(False, "--force", "--overwrite", help="Replace OUT."),
        dry_run: bool = typer.Option(
            False, "--dry-run", help="Check everything, say how large OUT gets; write nothing."
        ),
        as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
    ) -> None:
        """Dump a model's highest logits and log-sum-exp at every position of a text, to score others against."""
        from dataclasses import asdict

        from tqtool.evals.teacher import TeacherRequest, check_target, dump_teacher, plan_dump
        from tqtool.runtime.load import load, scoring_compute

        request = TeacherRequest(text=text, windows=windows, context=context, top=top, replace=force, skip=skip)
        behind = f" behind {skip}" if skip else ""
        if dry_run:
            plan = plan_dump(model, out, request)
            if as_json:
                emit_json(asdict(plan))
                return
            emit_line(
                f"{out}: would hold {windows} windows of {context}{behind}, top {plan.top} of {plan.vocab_size}, "
                f"{plan.size_bytes / 1e6:.1f} MB"
            )
            return
        check_target(out, request)
        loaded = load(model, compute=scoring_compute())
        with progress("teacher", windows) as advance:
            report = dump_teacher(loaded, out, request, lambda done: advance(done, "windows"))
        for name in report.removed:
            note(f"removed {name}, left by a run that was killed")
        if as_json:
            emit_json(asdict(report))
            return
        emit_line(
            f"{report.path}: {windows} windows of {context}{behind}, top {report.info.top} of {report.info.vocab_size} "
            f"({100 * report.mass_outside_top:.3g} % of the mass outside), {report.size_bytes / 1e6:.1f} MB, "
            f"ppl {report.ppl:.3f}"
        )
