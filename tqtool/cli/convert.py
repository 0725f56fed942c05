"""``tqtool convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tqtool.cli.job import (
    DEFAULT_SEED,
    Mtp,
    MtpSource,
    MtpTap,
    VisionSidecar,
    read_places,
    run_job,
    show_plan,
)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "convert", help=HELP, short_help="Quantize to affine, mxfp4, nvfp4 or mxfp8 (RTN, GPTQ), or only fold and cast."
    )(convert)


HELP = """Quantize a checkpoint to affine, mxfp4, nvfp4 or mxfp8 (RTN, or GPTQ with Hessians), or only fold and cast it.

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
    method: Annotated[str | None, typer.Option("--method", help="rtn (the default), or gptq with --hessians.")] = None,
    hessians: Annotated[Path | None, typer.Option("--hessians", help="Folder made by tqtool calibrate.")] = None,
    sink_weight: Annotated[
        float | None, typer.Option("--sink-weight", help="Ordinary rows that an attention sink counts for (gptq).")
    ] = None,
    sensitivity: Annotated[
        Path | None,
        typer.Option("--sensitivity", help="File of tqtool sensitivity: bits by module, with --target-bpw."),
    ] = None,
    target_bpw: Annotated[
        float | None,
        typer.Option(
            "--target-bpw", help="Bits a weight over all packed modules, scales and biases included, at most."
        ),
    ] = None,
    reuse: Annotated[
        list[Path] | None, typer.Option("--reuse", help="Artifact to take equal tensors from; repeatable.")
    ] = None,
    journal: Annotated[
        Path | None, typer.Option("--journal", help="Folder for finished tensors: a killed run repeated goes on there.")
    ] = None,
    mtp: Mtp = "none",
    mtp_source: MtpSource = None,
    mtp_tap: MtpTap = None,
    vision_sidecar: VisionSidecar = True,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub id.")] = None,
    check: Annotated[str, typer.Option("--check", help="After writing: forward, load or none.")] = "forward",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", "--force", help="Replace an artifact of tqtool at OUT.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Parse, plan, run, render."""
    from tqtool.artifact.reload import parse_depth
    from tqtool.errors import UserError
    from tqtool.formats.sensitivity_file import read_sensitivity
    from tqtool.pipeline.calibrated import SINK_WEIGHT
    from tqtool.pipeline.companion import companion_request
    from tqtool.pipeline.convert import ConvertRequest, check_artifact, plan_convert
    from tqtool.pipeline.rules import packed_setting, parse_dtype, parse_rule

    depth = parse_depth(check)
    if rotation_seed is not None and not rotate:
        raise UserError("--rotation-seed without --rotate-weights does nothing", hint="add --rotate-weights")
    if method not in (None, "rtn", "gptq"):
        raise UserError(f"--method {method!r} is unknown", hint="rtn or gptq")
    if (method == "gptq") != (hessians is not None):
        raise UserError("--method gptq and --hessians DIR belong together", hint="tqtool calibrate makes DIR")
    if sink_weight is not None and hessians is None:
        raise UserError("--sink-weight without --method gptq does nothing")
    if (sensitivity is None) != (target_bpw is None):
        raise UserError("--target-bpw and --sensitivity FILE belong together", hint="tqtool sensitivity makes FILE")
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
        hessians=hessians,
        sensitivity=None if sensitivity is None else read_sensitivity(sensitivity),
        target_bpw=target_bpw,
        reuse=tuple(reuse or ()),
        journal=journal,
        sink_weight=SINK_WEIGHT if sink_weight is None else sink_weight,
        mtp=companion_request(mtp, mtp_source, mtp_tap),
        vision_sidecar=vision_sidecar,
    )
    if hessians is not None and packing is None and sensitivity is None:
        raise UserError("--method gptq without bits packs nothing", hint="add --bits 4, for example")
    job = plan_convert(request)
    if dry_run:
        show_plan(job.plan, as_json=as_json)
        return
    run_job(job, label="convert", total=job.plan.totals.parameters, depth=depth, check=check_artifact, as_json=as_json)
