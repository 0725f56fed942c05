"""``tqtool bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tqtool.cli.generate import Activations, Compute

if TYPE_CHECKING:
    from tqtool.reports.speed import SpeedReport, Spread

HELP = """Measure a model's speed and memory: prompt and generation tokens per second, time to first token, peaks.

Each number of prompt tokens and each KV scheme is a row: the median of the rounds, and the lowest and highest of them.
--against OTHER measures a second model in the same run, in turns with the first, and says the ratio; mlx-lm:OTHER runs
it as stock mlx-lm alone would, mlx-lm:MODEL this very model (a packed one through the module file it ships). Prompts
are random tokens; end tokens end nothing. Nothing else should run on the machine.
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("bench", help=HELP, short_help="Measure tokens per second and memory, beside another model.")(bench)


def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Artifact, model folder or hub id.")],
    against: Annotated[
        str | None, typer.Option("--against", metavar="[mlx-lm:]OTHER", help="Model measured in turns with it.")
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", metavar="N,N…", help="Lengths of prompts: each a row.")
    ] = "128,512",
    new_tokens: Annotated[int, typer.Option("--new-tokens", help="Tokens to write at each.")] = 64,
    kv_quant: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-quant", metavar="SCHEME", help="KV cache, repeatable: none, turbo[:k<bits>v<bits>], affine8, affine4."
        ),
    ] = None,
    kv_start: Annotated[
        int, typer.Option("--kv-start", help="Keep the KV cache full until it has so many tokens, then pack them all.")
    ] = 0,
    repeats: Annotated[int, typer.Option("--repeats", help="Rounds that count.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", help="Rounds before that do not.")] = 1,
    compute: Annotated[
        Compute, typer.Option("--compute", help="Keep layers packed, or make them dense.")
    ] = Compute.PACKED,
    activations: Annotated[
        Activations,
        typer.Option("--activations", help="int8: inputs of CUDA kernels rounded to 8 bits, faster, less exact."),
    ] = Activations.FLOAT,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report, every run in it, as JSON.")] = False,
) -> None:
    """Parse, measure, render."""
    from dataclasses import asdict

    from tqtool.cli.render import emit_json, note, progress
    from tqtool.reports.speed import SpeedRequest, run_speed, total_runs

    request = SpeedRequest(
        model=model,
        against=against,
        prompt_tokens=_numbers(prompt_tokens),
        new_tokens=new_tokens,
        kv=tuple(None if text in ("none", "full") else text for text in kv_quant or ("none",)),
        kv_start=kv_start,
        repeats=repeats,
        warmup=warmup,
        compute=compute.value,
        activations=activations.value,
    )
    with progress("bench", total_runs(request)) as advance:
        report = run_speed(request, lambda what: advance(1, what))
    for line in report.notes:
        note(f"note: {line}")
    if as_json:
        emit_json(asdict(report))
        return
    _emit_machine(report)
    _emit_results(report)
    _emit_ratios(report)


def _numbers(text: str) -> tuple[int, ...]:
    from tqtool.errors import UserError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--prompt-tokens {text}: expected numbers, as in 128,512") from error


def _emit_machine(report: SpeedReport) -> None:
    from tqtool.cli.render import emit_line

    found = report.machine
    memory = "" if found["memory_bytes"] is None else f", {found['memory_bytes'] / 2**30:.0f} GiB"
    device = found["device_facts"].get("device_name") or found["device_facts"].get("architecture") or ""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    emit_line(
        f"{found['processor']}, {found['usable_cores']} of {found['logical_cores']} cores{memory}; {found['system']}"
    )
    emit_line(f"MLX on {found['device']} {device}; {versions}")
    for arm in report.arms:
        load = arm.load
        dtype = "" if load["dtype"] is None else f", {load['dtype']}"
        emit_line(
            f"{arm.name}: {load['weight_bytes'] / 1e6:.1f} MB of weights, {load['compute']}{dtype}, loaded in "
            f"{load['load_s']:.1f} s; BLAS {load['blas']['status']}: {Path(load['blas']['library']).name}"
        )
        for row in load["layers"]:
            emit_line(f"  {row['layers']} trellis layers at {row['rows']} rows: {row['path']} ({row['reason']})")


def _emit_results(report: SpeedReport) -> None:
    from tqtool.cli.render import emit_line, emit_table

    several = len(report.arms) > 1
    rows = [
        (
            *((arm.name,) if several else ()),
            f"{each.prompt_tokens}",
            f"{each.new_tokens}",
            each.kv or "full",
            _spread(each.prompt_tokens_per_s, 1),
            _spread(each.first_token_s, 3),
            _spread(each.new_tokens_per_s, 2),
            f"{each.cache_bytes / 1e6:.1f}",
            f"{each.mlx_peak_bytes / 1e6:.0f}",
            f"{each.peak_rss_bytes / 1e6:.0f}" + ("" if each.is_peak_of_run else "*"),
        )
        for arm in report.arms
        for each in arm.results
    ]
    columns = ("prompt", "new", "KV", "prompt tokens/s", "first token, s", "new tokens/s", "KV MB", "MLX MB", "RSS MB")
    emit_line()
    emit_table((*(("model",) if several else ()), *columns), rows)
    emit_line(f"median (lowest to highest) of {report.settings['repeats']} rounds; MB are peaks")
    if any(not each.is_peak_of_run for arm in report.arms for each in arm.results):
        emit_line("* since the start of the process: this system does not forget a peak")


def _emit_ratios(report: SpeedReport) -> None:
    from tqtool.cli.render import emit_line, emit_table

    if not report.ratios:
        return
    ours, theirs = (arm.name for arm in report.arms)
    rows = [
        (
            f"{each.prompt_tokens}",
            f"{each.kv or 'full'} / {each.against_kv or 'full'}",
            _spread(each.prompt_tokens_per_s, 2),
            f"{each.prompt_wins}/{each.prompt_tokens_per_s.n}",
            _spread(each.new_tokens_per_s, 2),
            f"{each.new_wins}/{each.new_tokens_per_s.n}",
        )
        for each in report.ratios
    ]
    emit_line()
    emit_table(
        ("prompt", "KV", "prompt rate", "faster", "generation rate", "faster"), rows, title=f"{ours} over {theirs}"
    )


def _spread(value: Spread, digits: int) -> str:
    return f"{value.median:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})"
