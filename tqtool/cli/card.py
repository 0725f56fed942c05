"""``tqtool card``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Write the model card of an artifact again: licence, how to run it, true size, measurements, how it was made.

Every artifact has a card already; this adds what it could not know. --results puts the reports of `eval kl` and
`eval tasks` into a table (arms beside it too; `tqtool run` leaves kl.json where it is found by itself). A licence is
copied from the source's card or stated here, never guessed. Only README.md, tqtool/measured.json, a licence file, with
--renew-module the module file, and their rows of the manifest change.
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("card", help=HELP, short_help="Write the model card of an artifact, with what was measured.")(card)


def card(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Folder that tqtool wrote.")],
    results: Annotated[
        list[str] | None,
        typer.Option(
            "--results", metavar="[NAME=]FILE", help="Report for the table, of this artifact or beside it; repeatable."
        ),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option("--base-model", metavar="ORG/NAME", help="Hub id of the source.")
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="Its licence, as hubs spell it: apache-2.0, mit, other …"),
    ] = None,
    licence_name: Annotated[str | None, typer.Option("--license-name", help="With --license other.")] = None,
    licence_link: Annotated[str | None, typer.Option("--license-link", help="With --license other.")] = None,
    licence_file: Annotated[
        Path | None, typer.Option("--license-file", help="Text of the licence, copied into the artifact.")
    ] = None,
    repo: Annotated[
        str | None, typer.Option("--repo", metavar="ORG/NAME", help="Where it will lie: stands in the card's commands.")
    ] = None,
    renew_module: Annotated[
        bool,
        typer.Option(
            "--renew-module", help="Put this version's tqtool_model.py into a packed artifact: newer kernels."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", "--overwrite", help="Replace a card that was edited since.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Parse, plan, write, render."""
    from tqtool.cli.render import emit_json, emit_line, note
    from tqtool.errors import UserError
    from tqtool.reports.card import CardRequest, plan_card

    given = {"license": licence, "license_name": licence_name, "license_link": licence_link}
    stated = {key: value for key, value in given.items() if value is not None}
    if stated and licence is None:
        raise UserError("--license-name and --license-link go with --license", hint="--license other, for example")
    request = CardRequest(
        artifact=artifact,
        results=tuple(results or ()),
        base_model=base_model,
        stated=stated,
        licence_file=licence_file,
        place=repo,
        renews_model_file=renew_module,
        force=force,
    )
    made = plan_card(request)
    if not dry_run:
        made.write()
    if as_json:
        emit_json(
            {
                "artifact": str(artifact),
                "dry_run": dry_run,
                "files": list(made.files),
                "notes": made.notes,
                "card": made.text,
            }
        )
        return
    for line in made.notes:
        note(f"note: {line}")
    emit_line(made.text if dry_run else str(artifact / "README.md"))
