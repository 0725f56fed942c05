"""``tqtool run``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from tqtool.recipes.opened import Advance

HELP = """Carry out a recipe: calibrate, measure, quantize, verify, score, with everything in OUT.

A step that an earlier run finished is not done again; an interrupted run is continued with --resume and loses at most
one layer of calibration or one tensor. recipes/ has examples, docs/recipes.md every field.
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("run", help=HELP, short_help="Carry out a recipe: a whole run from one YAML file.")(run)


def run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="FIELD=VALUE, e.g. quantize.k=2; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print recipe and steps, check all inputs; write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Parse, run, render."""
    import sys
    from dataclasses import asdict

    from tqtool.cli.render import emit_json, emit_line, emit_table, progress
    from tqtool.recipes.schema import dump_recipe, read_recipe

    resolved = read_recipe(recipe, changes or ())
    from tqtool.pipeline.preflight import readable_bytes
    from tqtool.recipes.run import check_recipe, outline, run_recipe

    def bar(label: str, total: float) -> AbstractContextManager[Advance]:
        return progress(label, total, quiet=as_json)

    if dry_run:
        steps = outline(resolved)
        if as_json:
            emit_json({"recipe": resolved.model_dump(mode="json"), "steps": steps})
        else:
            sys.stdout.write(dump_recipe(resolved).decode())
            sys.stdout.write("".join(f"# {number}. {step}\n" for number, step in enumerate(steps, 1)))  # still YAML
        check_recipe(resolved, out, bar, resume=resume)  # after the steps, which help to mend what it finds
        return

    report = run_recipe(resolved, out, bar, resume=resume)
    if as_json:
        emit_json(asdict(report))
        return
    size = readable_bytes(report.tensor_bytes)
    emit_line(f"{out / 'artifact'}: {size}, {report.bits_per_weight:.3f} bits per weight of the source")
    for step, state in report.steps.items():
        emit_line(f"{step}: {state}")
    if report.mix is not None:
        emit_table(("on the measuring windows", "mean bits", "KL"), list(mix_rows(report.mix)))
    if report.kl is not None:
        emit_line(f"KL {report.kl['kl']['mean']:.5f} nats per token, perplexity {report.kl['ppl']:.3f}")


def mix_rows(mix: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The written mix beside what was predicted of it, the model it was measured from, and the best candidate."""

    def with_error(name: str) -> str:
        error = mix.get(f"{name}_standard_error")
        return f"{mix[name]:.5f}" + ("" if error is None else f" ± {error:.5f}")

    bits = f"{mix['mean_bits']:.4f}"
    yield "the mix, predicted", bits, with_error("predicted_kl")
    yield "the mix, as written", bits, with_error("measured_kl")
    yield f"reference {mix['reference']}", str(mix["reference_bits"]), with_error("reference_kl")
    if "uniform_bits" in mix:
        yield "best candidate within the budget", str(mix["uniform_bits"]), with_error("uniform_kl")
