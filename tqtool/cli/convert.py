"""``tqtool convert``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from tqtool.pipeline.plan import JobPlan

DEFAULT_SEED = 42
T = TypeVar("T")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("convert", help=HELP, short_help="Round a checkpoint to nearest, or only fold and cast it.")(convert)


HELP = """Round a checkpoint to nearest (affine, mxfp4, nvfp4, mxfp8), or only fold and cast it.

With -q, --bits, --group-size or --mode every Linear and the embedding are packed; without, the result is dense. At
equal settings the tensors are byte for byte those of mlx_lm.convert. --rule makes exceptions, the last match wins.
"""


def convert(
    source: Annotated[str | None, typer.Argument(metavar="SRC", help="Model folder or hub id.")] = None,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Folder to create.")] = None,
    model: Annotated[str | None, typer.Option("--hf-path", "--model", help="Same as SRC.")] = None,
    mlx_path: Annotated[Path | None, typer.Option("--mlx-path", help="Same as OUT.")] = None,
    quantize: Annotated[bool, typer.Option("--quantize", "-q", help="Pack all modules.")] = False,
    bits: Annotated[int | None, typer.Option("--bits", "--q-bits", help="1-6 or 8 (affine).")] = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", "--q-group-size", help="32, 64 or 128 (affine).")
    ] = None,
    mode: Annotated[str | None, typer.Option("--mode", "--q-mode", help="affine, mxfp4, nvfp4 or mxfp8.")] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option("--rule", help="GLOB=bits:8,group:32[,mode:affine] or GLOB=float|bf16|f16|f32; repeatable."),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="bf16, f16 or f32 for dense tensors and scales.")] = None,
    rotate: Annotated[bool, typer.Option("--rotate-weights", help="Fold norms, rotate residual and heads.")] = False,
    rotation_seed: Annotated[int | None, typer.Option("--rotation-seed", help="Seed of the signs [42].")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub id.")] = None,
    check: Annotated[str, typer.Option("--check", help="After writing: forward, load or none.")] = "forward",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an artifact of tqtool at OUT.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Parse, plan, run, render."""
    from tqtool.artifact.reload import parse_depth
    from tqtool.cli.render import emit_json, emit_line, note, progress
    from tqtool.errors import UserError
    from tqtool.pipeline.convert import ConvertRequest, check_artifact, plan_convert
    from tqtool.pipeline.preflight import affordable_depth
    from tqtool.pipeline.rules import packed_setting, parse_dtype, parse_rule

    depth = parse_depth(check)
    if rotation_seed is not None and not rotate:
        raise UserError("--rotation-seed without --rotate-weights does nothing", hint="add --rotate-weights")
    places = read_places(source, out, model, mlx_path)
    packing = None
    if quantize or any(flag is not None for flag in (bits, group_size, mode)):
        packing = packed_setting(bits=bits, group_size=group_size, mode=mode)
    request = ConvertRequest(
        source=places.source,
        out=places.out,
        revision=revision,
        packing=packing,
        rules=tuple(parse_rule(text, packing) for text in rule or ()),
        dtype=None if dtype is None else parse_dtype(dtype, "--dtype"),
        rotation_seed=(DEFAULT_SEED if rotation_seed is None else rotation_seed) if rotate else None,
        overwrite=overwrite,
    )
    job = plan_convert(request)
    if dry_run:
        show_plan(job.plan, as_json=as_json)
        return
    depth, reduced = affordable_depth(depth, job.plan.totals.tensor_bytes)
    for line in (*job.plan.warnings, *job.plan.notes, *job.plan.hints, *([reduced] if reduced else [])):
        note(f"note: {line}")
    with progress("convert", job.plan.totals.parameters, quiet=as_json) as advance:
        result = job.run(advance, check=lambda folder: check_artifact(job, folder, depth))
    for line in result.notes:
        note(f"note: {line}")
    if as_json:
        emit_json({"out": str(result.out), "kind": job.kind, "check": depth, **result.plan.to_json()})
    else:
        emit_line(f"{result.out}: {summary(result.plan)}")


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
        f"{readable_bytes(totals.tensor_bytes)}, {totals.bits_per_weight:.3f} bits per weight "
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
    rows = [
        (group.pattern, group.count, group.shape, group.quantizer, readable_bytes(group.stored_bytes), group.remark)
        for group in grouped_rows(plan.rows)
    ]
    emit_table(("tensor", "n", "shape", "stored as", "size", "remark"), rows)
    totals = plan.totals
    seed = "" if plan.rotation_seed is None else f", seed {plan.rotation_seed}"
    emit_line()
    emit_line(f"transform  {plan.transform}{seed}")
    emit_line(f"result     {summary(plan)}")
    if totals.parameters != totals.source_parameters:
        emit_line(f"           {totals.bits_per_source_weight:.3f} bits per weight of the source (the head is untied)")
    emit_line(f"memory     about {readable_bytes(totals.peak_memory_bytes)} at the peak")
    emit_line(f"disk       {readable_bytes(totals.disk_bytes)}")
    for line in plan.warnings:
        emit_line(f"warning    {line}")
    for line in plan.notes:
        emit_line(f"note       {line}")
    for line in plan.hints:
        emit_line(f"hint       {line}")
