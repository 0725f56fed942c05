"""``tqtool eval tasks`` and ``tqtool eval mcnemar``: what a model gets right, and whether two differ."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tqtool.cli.eval import AS_JSON, COMPUTE, MODEL, Compute, load_for_scoring
from tqtool.cli.generate import KV_QUANT, KV_START
from tqtool.cli.render import emit_json, emit_line, emit_table, note, progress

if TYPE_CHECKING:
    from tqtool.evals.prompts import Format
    from tqtool.evals.task_result import Comparison
    from tqtool.evals.tasks import TaskReport
    from tqtool.kv.scheme import KVOptions


MAX_TOKENS = 256
"""New tokens of an answer unless ``--max-tokens`` says otherwise."""


class FormatChoice(StrEnum):
    """How items become text."""

    TEMPLATED = "templated"
    RAW = "raw"
    BOTH = "both"


def tasks(
    model: str = MODEL,
    items: str | None = typer.Option(None, "--items", help="JSON lines, or ORG/NAME:PATH.jsonl of a hub data set."),
    harness: str | None = typer.Option(
        None, "--lm-eval", metavar="TASK[,TASK]", help="Tasks of lm-evaluation-harness instead (extra lm-eval)."
    ),
    include: Path | None = typer.Option(None, "--include", help="Folder with task files of your own (--lm-eval)."),
    format_: FormatChoice = typer.Option(FormatChoice.BOTH, "--format", help="Chat template, plain text, or both."),
    limit: int | None = typer.Option(None, "--limit", help="Only the first N items."),
    max_tokens: int | None = typer.Option(
        None, "--max-tokens", "-m", help="Upper limit of new tokens of an answer of --items [256]."
    ),
    out: Path | None = typer.Option(None, "--out", "-o", help="Write the result with every outcome here (JSON)."),
    against: Path | None = typer.Option(None, "--against", help="Pair with this result of another model."),
    force: bool = typer.Option(False, "--force", "--overwrite", help="Replace OUT."),
    compute: Compute = COMPUTE,
    kv_quant: str | None = KV_QUANT,
    kv_start: int = KV_START,
    as_json: bool = AS_JSON,
) -> None:
    """Multiple choice by log-likelihood and greedy answers by exact match, with the chat template and raw."""
    from dataclasses import asdict

    from tqtool.evals.items import open_items
    from tqtool.evals.task_result import (
        check_pairable,
        check_target,
        compare,
        from_report,
        read_result,
        settings_json,
        to_json,
        write_result,
    )
    from tqtool.evals.tasks import FORMATS, plan_settings, run_tasks
    from tqtool.kv.scheme import parse_options

    kv = parse_options(kv_quant, kv_start)
    chosen = FORMATS if format_ is FormatChoice.BOTH else tuple(name for name in FORMATS if name == format_.value)
    _require_one_kind(items, harness, include, against, max_tokens)
    if harness is not None:
        _harness(model, harness, chosen, limit, include, _Target(out=out, force=force), compute, kv, as_json=as_json)
        return
    assert items is not None, "one of the two is given"
    if out is not None:
        check_target(out, replace=force)
    file = open_items(items).first(limit)
    settings = plan_settings(file, chosen, MAX_TOKENS if max_tokens is None else max_tokens)
    other = None if against is None else read_result(against)
    if other is not None:
        check_pairable(other, items_sha256=file.sha256, settings=settings_json(settings), name="this run")
    loaded = load_for_scoring(model, compute)
    with progress("tasks", settings.items * len(chosen)) as advance:
        report = run_tasks(loaded, file, settings, lambda done: advance(done, "items"), kv)
    for name in () if out is None else write_result(report, out):
        note(f"removed {name}, left by a run that was killed")
    comparison = None if other is None else compare(from_report(report, str(out or model)), other)
    if as_json:
        emit_json(to_json(report) | ({} if comparison is None else {"comparison": asdict(comparison)}))
        return
    _emit_report(report)
    if comparison is not None:
        emit_line()
        _emit_comparison(comparison)


def _require_one_kind(
    items: str | None, harness: str | None, include: Path | None, against: Path | None, max_tokens: int | None
) -> None:
    from tqtool.errors import UserError

    if (items is None) == (harness is None) or (include is not None and harness is None):
        raise UserError("expected either --items FILE, or --lm-eval TASK with its --include")
    if harness is not None and against is not None:
        raise UserError("--against pairs results of --items; those of --lm-eval are not kept by item")
    if harness is not None and max_tokens is not None:
        raise UserError(
            f"--max-tokens {max_tokens} with --lm-eval does nothing: each task of the harness has its own limit",
            hint="leave it out; a task file of your own (--include) sets generation_kwargs: max_gen_toks",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """Where a report goes, and whether it may replace a file."""

    out: Path | None
    force: bool


def _harness(
    model: str,
    names: str,
    formats: tuple[Format, ...],
    limit: int | None,
    include: Path | None,
    target: _Target,
    compute: Compute,
    kv: KVOptions,
    *,
    as_json: bool,
) -> None:
    """``--lm-eval``."""
    import itertools
    import json
    from dataclasses import asdict

    from tqtool.artifact.output import whole_file
    from tqtool.errors import UserError
    from tqtool.evals.lm_eval_bridge import require_harness, run_harness
    from tqtool.evals.task_result import check_target

    tasks = [name.strip() for name in names.split(",") if name.strip()]
    if not tasks or (limit is not None and limit < 1):
        raise UserError(f"--lm-eval {names!r} --limit {limit}: expected names of tasks, and a limit of at least 1")
    require_harness()
    if target.out is not None:
        check_target(target.out, replace=target.force)
    loaded = load_for_scoring(model, compute)
    done = itertools.count(1)

    def tick(_: int) -> None:  # how many requests there will be is the harness's secret
        if (count := next(done)) % 100 == 0:
            note(f"lm-eval: {count} requests")

    report = run_harness(loaded, tasks, formats, tick, limit=limit, include=include, kv=kv)
    body = {"format": "tqtool-lm-eval", "format_version": 1, **asdict(report)}
    if target.out is not None:
        with whole_file(target.out) as (file, _):
            file.write(json.dumps(body, indent=1, ensure_ascii=False).encode() + b"\n")
    if as_json:
        emit_json(body)
        return
    rows = [
        (task, format_, name, f"{value:.4f}", _error_of(values, name))
        for format_, found in report.results.items()
        for task, values in found.items()
        for name, value in values.items()
        if isinstance(value, int | float) and "_stderr," not in name and name != "sample_len"
    ]
    emit_table(("task", "format", "metric,filter", "value", "± se"), rows)
    if report.truncated:
        emit_line(f"{report.truncated} requests were cut on the left to the model's positions")


def _error_of(values: dict[str, Any], name: str) -> str:
    metric, _, filter_ = name.partition(",")
    error = values.get(f"{metric}_stderr,{filter_}")
    return f"{error:.4f}" if isinstance(error, int | float) else ""


def mcnemar(
    a: Path = typer.Argument(..., metavar="A", help="Result of `tqtool eval tasks --out`."),
    b: Path = typer.Argument(..., metavar="B", help="Result of another model on the same items."),
    as_json: bool = AS_JSON,
) -> None:
    """Exact paired test of two results: do the items that only one of them gets right favour one?"""
    from dataclasses import asdict

    from tqtool.evals.task_result import compare, read_result

    comparison = compare(read_result(a), read_result(b))
    if as_json:
        emit_json(asdict(comparison))
        return
    _emit_comparison(comparison)


def _emit_report(report: TaskReport) -> None:
    cache = f", KV cache {report.kv}" if report.kv else ""
    emit_line(f"{report.model}: {report.settings.items} items of {report.items} in {report.elapsed_s:.0f} s{cache}")
    rows = []
    for summary in report.summaries:
        for share in summary.shares:
            interval = f"{100 * share.low:.1f} … {100 * share.high:.1f}"
            rows.append(
                (
                    summary.task,
                    summary.format,
                    share.name,
                    f"{share.right}/{share.total}",
                    f"{100 * share.value:.1f}",
                    interval,
                )
            )
        if summary.mean_tokens is not None:
            rows.append((summary.task, summary.format, "tokens an answer", "", f"{summary.mean_tokens:.1f}", ""))
    emit_table(("task", "format", "what", "items", "%", "95 % (Wilson)"), rows)


def _emit_comparison(comparison: Comparison) -> None:
    emit_line(f"A {comparison.a}\nB {comparison.b}")
    if comparison.same_model:
        emit_line("A and B are the same model")
    rows = [
        (
            pairing.task,
            pairing.format,
            pairing.flag,
            pairing.both,
            pairing.only_a,
            pairing.only_b,
            pairing.neither,
            f"{pairing.p:.4g}",
        )
        for pairing in comparison.pairings
    ]
    emit_table(("task", "format", "what", "both", "only A", "only B", "neither", "p (McNemar, exact)"), rows)
