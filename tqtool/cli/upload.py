"""``tqtool upload``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Send an artifact to a hub repository, whole.

The artifact is verified first, and one that does not verify is refused. Repositories are made private unless --public.
Interrupted uploads go on when the command is repeated; config.json comes last, so nothing loads a part of a model. At
the end names, sizes and hashes on the hub are compared with the manifest. Who may write is the hub's own matter: log in
with `hf auth login` (or HF_TOKEN). --dry-run needs no network.
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("upload", help=HELP, short_help="Send a verified artifact to a hub repository.")(upload)


def upload(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Folder that tqtool wrote.")],
    repo: Annotated[
        str, typer.Argument(metavar="REPO", help="Repository, organization/name; made if it is not there.")
    ],
    public: Annotated[bool, typer.Option("--public", help="For everybody to see; without it private.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take the place of another model that the repository holds.")
    ] = False,
    check: Annotated[str, typer.Option("--check", help="Before, in stock mlx-lm: forward, load or none.")] = "forward",
    message: Annotated[str, typer.Option("--message", help="Of the commits.")] = "Upload a model with tqtool",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Verify, and print what would be sent.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Parse, verify, send, render."""
    from dataclasses import asdict

    from tqtool.artifact.publish import UploadRequest, plan_upload
    from tqtool.artifact.publish import upload as send
    from tqtool.artifact.reload import parse_depth
    from tqtool.cli.render import emit_json, emit_line, emit_table, note

    request = UploadRequest(
        artifact=artifact, repo=repo, is_public=public, replaces=replace, depth=parse_depth(check), message=message
    )
    plan = plan_upload(request)
    visibility = "public" if public else "private"
    for line in plan.notes:
        note(f"note: {line}")
    if dry_run:
        if as_json:
            emit_json(
                {
                    "repo": repo,
                    "visibility": visibility,
                    "files": plan.files,
                    "total_bytes": plan.total_bytes,
                    "notes": plan.notes,
                }
            )
            return
        emit_table(("file", "bytes"), [(name, f"{size:,}") for name, size in plan.files.items()])
        emit_line(f"{len(plan.files)} files, {plan.total_bytes:,} bytes → {repo} ({visibility}); nothing was sent")
        return
    done = send(plan)
    if as_json:
        emit_json({"repo": repo, "visibility": visibility, **asdict(done)})
        return
    state = "was there already" if done.was_complete else "sent and compared"
    emit_line(f"{done.url}: {done.files} files, {done.total_bytes:,} bytes, {state}")
