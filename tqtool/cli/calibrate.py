"""``tqtool calibrate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

MOST_NAMED = 8

HELP = """Sum what every linear layer reads over a text (Hessians), for convert --method gptq and trellis --ldlq.

Runs the model layer by layer on folded weights. Plain text is read from its end (scoring verbs read from the start); a
.jsonl file holds an object a line, with "text" or "messages". An interrupted run is finished with --resume.
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "calibrate", help=HELP, short_help="Collect Hessians over a text, for convert --method gptq and trellis --ldlq."
    )(calibrate)


def calibrate(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Model folder or hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    text: Annotated[Path, typer.Option("--text", help="UTF-8 text or .jsonl.")],
    rows: Annotated[int, typer.Option("--rows", "-n", help="Sequences.")] = 128,
    context: Annotated[int, typer.Option("--context", "-c", help="Tokens of a sequence at most.")] = 512,
    rotate: Annotated[
        bool, typer.Option("--rotate-weights/--no-rotate-weights", help="In the basis of trellis, or of convert.")
    ] = False,
    rotation_seed: Annotated[int | None, typer.Option("--rotation-seed", help="Seed of the signs. [42]")] = None,
    disjoint: Annotated[
        list[Path] | None, typer.Option("--disjoint-from", help="Teacher dump that must share no text; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Finish an interrupted run.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub id.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Parse, plan, run, render."""
    from tqtool.calibration.calibrate import CalibrationRequest, plan_calibration
    from tqtool.calibration.calibrate import calibrate as run
    from tqtool.cli.job import DEFAULT_SEED
    from tqtool.cli.render import emit_json, emit_line, note, progress
    from tqtool.errors import UserError
    from tqtool.pipeline.preflight import readable_bytes

    if rotation_seed is not None and not rotate:
        raise UserError("--rotation-seed without --rotate-weights does nothing", hint="add --rotate-weights")
    job = plan_calibration(
        CalibrationRequest(
            source=source,
            out=out,
            text=text,
            rows=rows,
            context=context,
            revision=revision,
            rotation_seed=(DEFAULT_SEED if rotation_seed is None else rotation_seed) if rotate else None,
            disjoint_from=tuple(disjoint or ()),
            resume=resume,
        )
    )
    facts = {
        "sequences": job.rows.record.sequences,
        "tokens": job.rows.record.tokens,
        "layers": job.layers,
        "peak_memory_bytes": job.peak_memory_bytes,
        "disk_bytes": job.disk_bytes,
    }
    size = (
        f"{facts['sequences']} sequences, {facts['tokens']} tokens, {job.layers} layers, "
        f"about {readable_bytes(job.peak_memory_bytes)} of memory, {readable_bytes(job.disk_bytes)} of disk"
    )
    if dry_run:
        emit_json(facts) if as_json else emit_line(f"{out}: would hold {job.plan.id}: {size}")
        return
    with progress("calibrate", job.layers, quiet=as_json) as advance:
        info = run(job, lambda layers: advance(layers, "layers"))
    dropped = sum(record.dropped for record in info.inputs)
    if as_json:
        lost = [record.model_dump() for record in info.dropped]
        body = {
            "content_sha256": info.content_sha256(),
            "dropped_rows": dropped,
            "dropped_sequences": lost,
            "experts": {routing.block: routing.tokens for routing in info.routing},
        }
        emit_json({"out": str(out), **body, **facts})
        return
    for record in info.dropped:
        note(f"note: sequence {record.sequence} is not finite behind layer {record.layer}: left out from there on")
    for routing in info.routing:
        emit_line(f"{routing.block}: {routing_text(routing.tokens)}")
    emit_line(f"{out}: {info.transform}, {size}; {len(info.dropped)} sequences, {dropped} rows dropped")


def routing_text(tokens: Sequence[int]) -> str:
    """One line about how many tokens each expert of a block read."""
    middle = sorted(tokens)[len(tokens) // 2]
    idle = [expert for expert, count in enumerate(tokens) if not count]
    named = ", ".join(map(str, idle[:MOST_NAMED])) + (f" and {len(idle) - MOST_NAMED} more" * (len(idle) > MOST_NAMED))
    unread = f"; no token went to {named}" if idle else ""
    each = f"{len(tokens)} experts read {min(tokens)} to {max(tokens)} tokens each, median {middle}"
    return f"{each if len(tokens) > 1 else f'1 expert read {tokens[0]} tokens'}{unread}"
