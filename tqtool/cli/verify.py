"""``tqtool verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MARKS = {"pass": "ok", "fail": "FAIL", "skip": "--"}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("verify", short_help="Check an artifact: hashes, config, decode, reload in stock mlx-lm.")(verify)


def verify(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Folder that tqtool wrote.")],
    check: Annotated[str, typer.Option("--check", help="In stock mlx-lm: forward, load or none.")] = "forward",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check an artifact against its manifest, its config, its format and stock mlx-lm.

    Every check runs and is printed; the exit code is 4 when one failed.
    """
    from dataclasses import asdict

    from tqtool.artifact.reload import parse_depth
    from tqtool.artifact.verify import verify_artifact
    from tqtool.cli.render import emit_json, emit_line

    report = verify_artifact(artifact, depth=parse_depth(check))
    if as_json:
        emit_json({**asdict(report), "is_good": report.is_good})
    else:
        for each in report.checks:
            emit_line(f"{_MARKS[each.status]:5}{each.name:9} {each.detail}")
            for problem in each.problems:
                emit_line(f"     {'':9} {problem}")
    report.require()
