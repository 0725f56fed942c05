"""``tqtool trellis``."""

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
    app.command("trellis", help=HELP, short_help="Fold and code a checkpoint on the trellis at 1-4 bits.")(trellis)


HELP = """Fold and code a checkpoint on the trellis at 1-4 bits per weight, in one streaming pass.

The result is packed (tqtool runs it; stock mlx-lm loads it with --trust-remote-code), or with --fake-quant the same
values dense in bf16, or with --carrier the same values rounded once more, to 8-bit affine; stock mlx-lm loads the last
two as they are.
"""


def trellis(
    source: Annotated[str | None, typer.Argument(metavar="SRC", help="Model folder or hub id.")] = None,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Folder to create.")] = None,
    model: Annotated[str | None, typer.Option("--hf-path", "--model", help="Same as SRC.")] = None,
    mlx_path: Annotated[Path | None, typer.Option("--mlx-path", help="Same as OUT.")] = None,
    k: Annotated[int, typer.Option("--k", "-k", help="Bits per weight, 1-4.")] = 3,
    k_map: Annotated[
        Path | None,
        typer.Option("--k-map", help="JSON file: bits for single modules, or with --k-budget sensitivities."),
    ] = None,
    k_budget: Annotated[
        float | None, typer.Option("--k-budget", help="Mean bits of the codes, spent by the sensitivities of --k-map.")
    ] = None,
    modules: Annotated[
        list[str] | None,
        typer.Option("--modules", help="mlp (the default), all, or a glob of module paths; repeatable."),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option("--layout", help="tile (16x16; the default with --ldlq) or axis (else)."),
    ] = None,
    fold_channels: Annotated[
        bool, typer.Option("--fold-channels", help="Reorder and rescale the channels of each MLP (needs --ldlq).")
    ] = False,
    down_axis: Annotated[
        str | None,
        typer.Option("--down-axis", help="With --layout axis: code down_proj along out (the default) or in."),
    ] = None,
    fake_quant: Annotated[bool, typer.Option("--fake-quant", help="Store the decoded values dense.")] = False,
    carrier: Annotated[bool, typer.Option("--carrier", help="Store the decoded values in 8-bit affine.")] = False,
    code: Annotated[str, typer.Option("--code", help="mul1, 1mad or 3inst; rptc, random with --fake-quant.")] = "mul1",
    window: Annotated[int, typer.Option("--window", "-L", help="State bits: 12, 14 or 16; slower and better.")] = 12,
    warmup: Annotated[
        int | None, typer.Option("--warmup", help="Shorter first pass of N steps each side of the seam; faster.")
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option("--bits", "--q-bits", help="Of modules not on the trellis. [6; 4 for an untied embedding]"),
    ] = None,
    group_size: Annotated[int | None, typer.Option("--group-size", "--q-group-size", help="Of those. [64]")] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option("--rule", help="GLOB=bits:8,group:32 or GLOB=float: takes modules from the trellis; repeatable."),
    ] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate-weights/--no-rotate-weights", help="Fold norms, rotate residual and heads.")
    ] = True,
    rotation_seed: Annotated[int | None, typer.Option("--rotation-seed", help="Seed of the signs. [42]")] = None,
    ldlq: Annotated[
        Path | None, typer.Option("--ldlq", help="Folder made by tqtool calibrate: code with feedback under Hessians.")
    ] = None,
    sink_weight: Annotated[
        float | None, typer.Option("--sink-weight", help="Ordinary rows that an attention sink counts for (--ldlq).")
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
    threads: Annotated[int, typer.Option("--threads", min=0, help="Encoder threads; 0 is one per core.")] = 0,
    backend: Annotated[
        str,
        typer.Option(
            "--backend", help="Searches paths: auto, cuda, metal, cpu. Same result; with --ldlq but for rounding."
        ),
    ] = "auto",
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
    from tqtool.formats.sensitivity_file import read_kmap_or_sensitivity
    from tqtool.mathx.codes import parse_code
    from tqtool.pipeline.calibrated import SINK_WEIGHT
    from tqtool.pipeline.coding import OTHER, parse_axis, parse_form, parse_layout
    from tqtool.pipeline.companion import companion_request
    from tqtool.pipeline.job import Meter
    from tqtool.pipeline.rules import packed_setting, parse_rule
    from tqtool.pipeline.trellis import TrellisRequest, check_trellis, coded_weights, plan_trellis
    from tqtool.solve.search import parse_backend
    from tqtool.solve.trellis import TrellisOptions

    depth = parse_depth(check)
    if rotation_seed is not None and not rotate:
        raise UserError("--rotation-seed with --no-rotate-weights does nothing", hint="leave one out")
    if sink_weight is not None and ldlq is None:
        raise UserError("--sink-weight without --ldlq does nothing")
    places = read_places(source, out, model, mlx_path)
    rates, sensitivity = read_kmap_or_sensitivity(k_map, k_budget)
    meter = Meter()
    other = None
    if bits is not None or group_size is not None:
        other = packed_setting(bits=bits or OTHER.bits, group_size=group_size or OTHER.group_size, mode="affine")
    request = TrellisRequest(
        source=places.source,
        out=places.out,
        options=TrellisOptions(k=k, window=window, code=parse_code(code), warmup=warmup, threads=threads),
        revision=revision,
        modules=tuple(modules or ("mlp",)),
        layout=parse_layout(layout),
        fold_channels=fold_channels,
        down_axis=parse_axis(down_axis),
        form=parse_form(fake_quant=fake_quant, carrier=carrier),
        other=other,
        rules=tuple(parse_rule(text, other or OTHER) for text in rule or ()),
        rotation_seed=(DEFAULT_SEED if rotation_seed is None else rotation_seed) if rotate else None,
        overwrite=overwrite,
        hessians=ldlq,
        reuse=tuple(reuse or ()),
        journal=journal,
        k_map=rates,
        sensitivity=sensitivity,
        k_budget=k_budget,
        backend=parse_backend(backend),
        sink_weight=SINK_WEIGHT if sink_weight is None else sink_weight,
        mtp=companion_request(mtp, mtp_source, mtp_tap),
        vision_sidecar=vision_sidecar,
        tick=meter,
    )
    job = plan_trellis(request)
    if dry_run:
        show_plan(job.plan, as_json=as_json)
        return
    run_job(
        job,
        label="encode",
        total=coded_weights(job),
        depth=depth,
        check=check_trellis,
        as_json=as_json,
        meter=meter,
    )
