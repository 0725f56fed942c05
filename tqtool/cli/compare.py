"""``tqtool compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tqtool.reports.compare import Comparison

HELP = """Models (arms) side by side: size, KL, perplexity, tasks, and which of them nothing beats.

Each ARM is a report of `tqtool eval kl --json`, a result of `tqtool eval tasks --out`, or a folder of `tqtool run`;
NAME=PATH names it, and reports of one name are one arm. A task result without a name belongs to the arm of the same
weights. All must have been scored against the same teacher, on the same windows and items, and each model's folder
must still hold what was scored.
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("compare", help=HELP, short_help="Models side by side: size, KL, tasks; which of them nothing beats.")(
        compare
    )


def compare(
    arms: Annotated[list[str], typer.Argument(metavar="ARM...", help="Reports or runs.")],
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="Arm that the tasks of all others are paired with (McNemar).")
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Also write one HTML file with the pictures.")] = None,
    force: Annotated[bool, typer.Option("--force", "--overwrite", help="Replace the file of --html.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Read, compare, render."""
    from dataclasses import asdict

    from tqtool.cli.render import emit_json, emit_line
    from tqtool.errors import UserError
    from tqtool.reports.compare import compare as read

    if page is not None and page.exists() and not force:
        raise UserError(f"{page}: exists already", hint="give another name, or --force to replace it")
    comparison = read(arms, baseline=baseline)
    if page is not None:
        from tqtool.artifact.output import whole_file
        from tqtool.reports.page import page as render

        text = render(comparison)
        with whole_file(page) as (file, _):
            file.write(text.encode())
    if as_json:
        emit_json(asdict(comparison))
        return
    _emit_sizes(comparison)
    _emit_tasks(comparison)
    if page is not None:
        emit_line(str(page))


def _emit_sizes(comparison: Comparison) -> None:
    from tqtool.cli.render import emit_line, emit_table
    from tqtool.reports.compare import facts

    rows = []
    for arm in comparison.arms:
        scores: tuple[str, ...] = ("–", "–", "–", "")
        if (found := arm.distance) is not None:
            scores = (
                f"{found.kl:.4f} ± {found.kl_se:.4f}",
                f"{found.ppl:.3f}",
                f"{100 * found.top1:.1f} %",
                "frontier" if arm.is_frontier else "",
            )
        rows.append((arm.name, f"{arm.weight_bytes / 1e6:.1f}", f"{arm.bits_per_weight:.3f}", *scores))
    emit_table(("arm", "MB", "bits/weight", "KL ± se", "perplexity", "top-1", ""), rows)
    if comparison.conditions:
        emit_line()
        emit_line(facts(comparison.conditions))


def _emit_tasks(comparison: Comparison) -> None:
    """One column a task and format; one line of conditions a task."""
    from tqtool.cli.render import emit_line, emit_table
    from tqtool.reports.compare import facts
    from tqtool.reports.tasks import columns_of

    columns = columns_of(score for arm in comparison.arms for score in arm.tasks)
    if not columns:
        return
    rows = []
    for arm in comparison.arms:
        found = {score.column: score.text for score in arm.tasks}
        if found:
            rows.append((arm.name, *(found.get(column, "–") for column in columns)))
    emit_line()
    emit_table(("arm", *(" ".join(column) for column in columns)), rows)
    emit_line()
    paired = "" if comparison.baseline is None else f"; p: exact McNemar test against {comparison.baseline}"
    emit_line(f"% right [95 %, Wilson]{paired}")
    for conditions in comparison.task_conditions:
        emit_line(facts(conditions))
