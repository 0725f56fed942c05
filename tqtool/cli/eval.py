"""``tqtool eval``: score any artifact or mlx-lm model. ``kl`` and ``ppl`` are here, the rest in ``tasks``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tqtool.cli.generate import KV_QUANT, KV_START
from tqtool.cli.render import emit_json, emit_line, emit_table, progress

if TYPE_CHECKING:
    from tqtool.evals.estimate import Estimate
    from tqtool.evals.kl import KlReport
    from tqtool.runtime.load import LoadedModel


class Compute(StrEnum):
    """How quantized layers run while scoring."""

    AUTO = "auto"
    PACKED = "packed"
    EXPAND = "expand"


MODEL = typer.Argument(..., metavar="MODEL", help="Artifact, model folder or hub id.")
COMPUTE = typer.Option(Compute.AUTO, "--compute", help="auto: dense on a CPU, packed on a GPU.")
AS_JSON = typer.Option(False, "--json", help="Print the report as JSON.")


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    from tqtool.cli.tasks import mcnemar, tasks

    group = typer.Typer(help="Score a model: KL to a teacher dump, perplexity, tasks.", no_args_is_help=True)
    group.command("kl")(kl)
    group.command("ppl")(ppl)
    group.command("tasks")(tasks)
    group.command("mcnemar")(mcnemar)
    app.add_typer(group, name="eval")


def kl(
    model: str = MODEL,
    teacher: Path = typer.Option(..., "--teacher", help="Dump made by `tqtool teacher`."),
    windows: int | None = typer.Option(None, "--windows", "-n", help="Score only the first N windows."),
    text: Path | None = typer.Option(None, "--text", help="Check that the dump was made from this file."),
    flips: int | None = typer.Option(
        None,
        "--flips",
        min=-1,
        show_default="20 with --json, else none",
        help="Flips to list, largest teacher margin first; -1 for all.",
    ),
    compute: Compute = COMPUTE,
    kv_quant: str | None = KV_QUANT,
    kv_start: int = KV_START,
    as_json: bool = AS_JSON,
) -> None:
    """Mean KL to the teacher with standard errors, top-1 agreement, perplexity, flips with their margins."""
    from dataclasses import asdict, replace

    from tqtool.cli.render import note
    from tqtool.evals.flattered import flattered
    from tqtool.evals.kl import check_text, score_kl
    from tqtool.formats.teacher import open_dump
    from tqtool.kv.scheme import parse_options

    kv = parse_options(kv_quant, kv_start)
    dump = open_dump(teacher)
    if text is not None:
        check_text(dump, text)
    loaded = load_for_scoring(model, compute)
    listed = flips if flips is not None else 20 if as_json else 0
    with progress("kl", windows or dump.info.windows) as advance:
        report = score_kl(
            loaded, dump, lambda done: advance(done, "windows"), windows=windows, keep_flips=listed, kv=kv
        )
    for line in flattered(loaded.report.path, dump, loaded.tokenizer):
        note(f"warning: {line}")
        report = replace(report, warnings=(*report.warnings, line))
    if as_json:
        emit_json(asdict(report))
        return
    rows = [
        ("KL(teacher ‖ model)", f"{_with_error(report.kl, 6)} nats per token"),
        ("median, p95, p99, max", "  ".join(f"{value:.5f}" for value in report.kl_quantiles)),
        ("same first token", f"{_with_error(report.top1, 4)}, {report.flip_count} flips"),
        ("perplexity", f"{report.ppl:.4f} (teacher {report.teacher_ppl:.4f})"),
        (
            "outside the top",
            f"{report.mass_outside_top:.2e} of the teacher, {report.model_mass_outside_top:.2e} here",
        ),
        ("scored", f"{report.tokens} tokens, {report.windows} windows, {report.tokens_per_s:.0f} tokens/s"),
        *([("KV cache", report.kv)] if report.kv else []),
    ]
    emit_table(("model", report.model), rows)
    if listed:
        _emit_flips(loaded, report)


def _emit_flips(loaded: LoadedModel, report: KlReport) -> None:
    """One line a flip; the tokens come last because their width varies, and as repr because they hold anything."""

    def show(token: int) -> str:
        return f"{loaded.tokenizer.decode([token])!r} ({token})"

    emit_line(f"\n{len(report.flips)} of {report.flip_count} flips; margins in logits")
    emit_line(f"{'window':>6} {'position':>8} {'teacher margin':>14} {'model margin':>12}  teacher → model")
    for flip in report.flips:
        margins = f"{flip.teacher_margin:>14.4f} {flip.model_margin:>12.4f}"
        tokens = f"{show(flip.teacher_token)} → {show(flip.model_token)}"
        emit_line(f"{flip.window:>6} {flip.position:>8} {margins}  {tokens}")


def ppl(
    model: str = MODEL,
    text: Path = typer.Option(..., "--text", help="UTF-8 text to score."),
    windows: int = typer.Option(32, "--windows", "-n", help="Windows, from the start of the text."),
    context: int = typer.Option(512, "--context", "-c", help="Tokens of a window."),
    compute: Compute = COMPUTE,
    kv_quant: str | None = KV_QUANT,
    kv_start: int = KV_START,
    as_json: bool = AS_JSON,
) -> None:
    """Perplexity on the first windows of a text, with standard errors."""
    from dataclasses import asdict

    from tqtool.evals.ppl import score_ppl
    from tqtool.evals.text import check_source
    from tqtool.kv.scheme import parse_options

    kv = parse_options(kv_quant, kv_start)
    check_source(text, windows=windows, context=context)
    loaded = load_for_scoring(model, compute)
    with progress("ppl", windows) as advance:
        report = score_ppl(
            loaded, text, windows=windows, context=context, tick=lambda done: advance(done, "windows"), kv=kv
        )
    if as_json:
        emit_json(asdict(report))
        return
    error = "" if report.ppl_se is None else f" ± {report.ppl_se:.3f}"
    rows = [
        ("perplexity", f"{report.ppl:.4f}{error}"),
        ("NLL", f"{_with_error(report.nll, 5)} nats per token"),
        ("scored", f"{report.tokens} tokens, {report.windows} windows, {report.tokens_per_s:.0f} tokens/s"),
        *([("KV cache", report.kv)] if report.kv else []),
    ]
    emit_table(("model", report.model), rows)


def load_for_scoring(model: str, compute: Compute) -> LoadedModel:
    """The model as ``--compute`` wants it."""
    from tqtool.runtime.load import load, scoring_compute

    if compute is Compute.AUTO:
        return load(model, compute=scoring_compute())
    return load(model, compute="packed" if compute is Compute.PACKED else "expand")


def _with_error(value: Estimate, digits: int) -> str:
    errors = []
    if value.se_windows is not None:
        errors.append(f"{value.se_windows:.{digits}f} over windows")
    if value.se_tokens is not None:
        errors.append(f"{value.se_tokens:.{digits}f} over tokens")
    return f"{value.mean:.{digits}f}" + (f" ± {', '.join(errors)}" if errors else "")
