"""``tqtool run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Carry out a recipe: calibrate, quantize, verify, score, with everything in OUT.

A step that an earlier run finished is not done again; an interrupted run is continued with --resume and loses at most
one layer of calibration or one tensor. recipes/ has examples, docs/recipes.md every field.
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("run", help=HELP, short_help="Carry out a recipe.")(run)


def run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="FIELD=VALUE, e.g. quantize.k=2; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Parse, run, render."""
    import sys
    from dataclasses import asdict

    from tqtool.cli.render import emit_json, emit_line, progress
    from tqtool.recipes.schema import dump_recipe, read_recipe

    resolved = read_recipe(recipe, changes or ())
    if dry_run:
        sys.stdout.write(dump_recipe(resolved).decode())
        return
    from tqtool.pipeline.preflight import readable_bytes
    from tqtool.recipes.run import run_recipe

    report = run_recipe(resolved, out, lambda label, total: progress(label, total, quiet=as_json), resume=resume)
    if as_json:
        emit_json(asdict(report))
        return
    size = readable_bytes(report.tensor_bytes)
    emit_line(f"{out / 'artifact'}: {size}, {report.bits_per_weight:.3f} bits per weight of the source")
    for step, state in report.steps.items():
        emit_line(f"{step}: {state}")
    if report.kl is not None:
        emit_line(f"KL {report.kl['kl']['mean']:.5f} nats per token, perplexity {report.kl['ppl']:.3f}")
