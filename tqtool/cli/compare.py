"""``tqtool compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Arms side by side: size, KL, perplexity, and which of them nothing beats.

Each ARM is a report of `tqtool eval kl --json`, or a folder of `tqtool run`; NAME=PATH names it. All must have been
scored against the same teacher, on the same windows.
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("compare", help=HELP, short_help="Arms side by side, with their frontier.")(compare)


def compare(
    arms: Annotated[list[str], typer.Argument(metavar="ARM...", help="Reports or runs.")],
    page: Annotated[Path | None, typer.Option("--html", help="Also write one HTML file with the pictures.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --html.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Read, compare, render."""
    from dataclasses import asdict

    from tqtool.cli.render import emit_json, emit_line, emit_table
    from tqtool.errors import UserError
    from tqtool.reports.compare import compare as read

    if page is not None and page.exists() and not force:
        raise UserError(f"{page}: exists already", hint="give another name, or --force to replace it")
    comparison = read(arms)
    if page is not None:
        from tqtool.artifact.output import whole_file
        from tqtool.reports.page import page as render

        text = render(comparison)
        with whole_file(page) as (file, _):
            file.write(text.encode())
    if as_json:
        emit_json(asdict(comparison))
        return
    rows = [
        (
            arm.name,
            f"{arm.weight_bytes / 1e6:.1f}",
            f"{arm.bits_per_weight:.3f}",
            f"{arm.kl:.4f} ± {arm.kl_se:.4f}",
            f"{arm.ppl:.3f}",
            f"{100 * arm.top1:.1f} %",
            "frontier" if arm.is_frontier else "",
        )
        for arm in comparison.arms
    ]
    emit_table(("arm", "MB", "bits/weight", "KL ± se", "perplexity", "top-1", ""), rows)
    emit_line()
    emit_line(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in comparison.conditions.items()))
    if page is not None:
        emit_line(str(page))
