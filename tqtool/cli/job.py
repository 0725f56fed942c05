"""What ``convert`` and ``trellis`` share on the command line: places, the printed plan, the run and its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from tqtool.artifact.reload import Depth
    from tqtool.pipeline.job import Job, Meter
    from tqtool.pipeline.plan import JobPlan

DEFAULT_SEED = 42
T = TypeVar("T")

Mtp = Annotated[
    str, typer.Option("--mtp", help="Companion for multi-token prediction, in OUT/mtp: none, dense, 8 or 4 bits.")
]
MtpSource = Annotated[
    str | None, typer.Option("--mtp-source", help="Folder or hub id that holds it. [SRC, or SRC/mtp]")
]
MtpTap = Annotated[
    str | None, typer.Option("--mtp-tap", help="It reads the hidden state post or pre the final norm. [post]")
]
VisionSidecar = Annotated[
    bool,
    typer.Option("--vision-sidecar/--no-vision-sidecar", help="A vision tower also as optiq/optiq_vision.safetensors."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where to read and where to write."""

    source: str
    out: Path


def read_places(source: str | None, out: Path | None, model: str | None, mlx_path: Path | None) -> Places:
    """SRC and OUT from arguments and from mlx-lm's options; with --model alone, a single argument is OUT."""
    if model is not None and source is not None and out is None and mlx_path is None:
        return Places(source=model, out=Path(source))
    return Places(
        source=one_of("SRC", source, model, "--hf-path/--model"), out=one_of("OUT", out, mlx_path, "--mlx-path")
    )


def one_of(label: str, positional: T | None, option: T | None, flag: str) -> T:
    """The value given as argument or as option; both or neither is a UserError."""
    from tqtool.errors import UserError

    if positional is not None and option is not None:
        raise UserError(f"{label} is given twice, as argument and by {flag}")
    value = positional if positional is not None else option
    if value is None:
        raise UserError(f"{label} is missing", hint=f"tqtool convert SRC OUT, or {flag}")
    return value


def summary(plan: JobPlan) -> str:
    """``538 tensors, 75.8 MB, 4.503 bits per weight (codes 4.001), 1 shard``."""
    from tqtool.pipeline.preflight import readable_bytes

    totals = plan.totals
    return (
        f"{totals.tensors} tensors in {totals.shards} shard{'s' if totals.shards != 1 else ''}, "
        f"{readable_bytes(totals.tensor_bytes)}, {totals.bits_per_source_weight:.3f} bits per weight "
        f"(codes alone {totals.code_bits_per_weight:.3f})"
    )


def show_plan(plan: JobPlan, *, as_json: bool) -> None:
    """The plan on stdout: every row as JSON, or layers folded together as a table."""
    from tqtool.cli.render import emit_json, emit_line, emit_table
    from tqtool.pipeline.plan import grouped_rows
    from tqtool.pipeline.preflight import readable_bytes

    if as_json:
        emit_json(plan.to_json())
        return
    parts = [("", plan.rows), *([("mtp/", plan.companion.rows)] if plan.companion is not None else [])]
    rows = [
        (
            f"{place}{each.pattern}",
            each.count,
            each.shape,
            each.quantizer,
            readable_bytes(each.stored_bytes),
            each.remark,
        )
        for place, found in parts
        for each in grouped_rows(found)
    ]
    emit_table(("tensor", "n", "shape", "stored as", "size", "remark"), rows)
    totals = plan.totals
    seed = "" if plan.rotation_seed is None else f", seed {plan.rotation_seed}"
    emit_line()
    emit_line(f"transform  {plan.transform}{seed}")
    emit_line(f"result     {summary(plan)}")
    if plan.companion is not None:
        emit_line(f"companion  mtp/: {summary(plan.companion)}")
    if totals.parameters != totals.source_parameters:
        emit_line(
            f"           over the source's weights; {totals.bits_per_weight:.3f} over these, the head being untied"
        )
    check = readable_bytes(totals.check_memory_bytes)
    emit_line(
        f"memory     about {readable_bytes(totals.peak_memory_bytes)} at the peak, plus {check} for --check forward"
    )
    emit_line(f"disk       {readable_bytes(totals.disk_bytes)}")
    for line in plan.warnings:
        emit_line(f"warning    {line}")
    for line in plan.notes:
        emit_line(f"note       {line}")
    for line in plan.hints:
        emit_line(f"hint       {line}")


def run_job(
    job: Job,
    *,
    label: str,
    total: float,
    depth: Depth,
    check: Callable[[Job, Path, Depth], None],
    as_json: bool,
    meter: Meter | None = None,
) -> None:
    """Say what was planned, do it, say what came out.

    Args:
        job: The plan.
        label: Word before the progress.
        total: Amount of work in the unit of the progress: parameters, or what ``meter`` counts.
        depth: Of the check after writing; reduced, and said so, when memory does not suffice.
        check: Reloads the written folder.
        as_json: JSON on stdout and no progress.
        meter: Moved by the encoder inside the job, instead of after each tensor.
    """
    from tqtool.cli.render import emit_json, emit_line, note, progress
    from tqtool.pipeline.job import silent
    from tqtool.pipeline.preflight import affordable_depth

    depth, reduced = affordable_depth(depth, job.plan.totals.check_memory_bytes)
    for line in (*job.plan.warnings, *job.plan.notes, *job.plan.hints, *([reduced] if reduced else [])):
        note(f"note: {line}")

    def checked(folder: Path) -> None:
        if depth != "none" and not as_json:
            note("check: loading the result in stock mlx-lm")
        check(job, folder, depth)

    with progress("check source", job.checkpoint.nbytes, quiet=as_json, silent_s=2.0) as advance:
        job.check_source(advance)
    with progress(label, total, quiet=as_json) as advance:
        if meter is not None:
            meter.advance = advance
        result = job.run(silent if meter else advance, check=checked, source_is_checked=True)
    for line in result.notes:
        note(f"note: {line}")
    if as_json:
        emit_json({"out": str(result.out), "kind": job.kind, "check": depth, **result.plan.to_json()})
    else:
        emit_line(f"{result.out}: {summary(result.plan)}")
        if result.plan.companion is not None:
            emit_line(f"{result.out / 'mtp'}: {summary(result.plan.companion)}")
