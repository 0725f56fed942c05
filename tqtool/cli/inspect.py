"""``tqtool inspect``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tqtool.pipeline.inspection import Inspection

HELP = """Show what a model is and what each verb would do with it.

PATH is a model folder, a hub id or a GGUF file; quantized models and artifacts of tqtool are described too. Only
headers and configuration are read; with --values every weight is too, and must be finite.
"""
WASTE_SHOWN = 0.0005
"""Share of padded weights from which a module is worth a line."""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("inspect", help=HELP, short_help="Show what a model is and what each verb would do with it.")(inspect)


def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Model folder, hub id or GGUF file.")],
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub id.")] = None,
    values: Annotated[bool, typer.Option("--values", help="Read every weight too: are all of them finite?")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Parse, look, render."""
    from tqtool.cli.render import emit_json
    from tqtool.pipeline.inspection import inspect_model

    report = inspect_model(path, revision=revision, read_values=(lambda size, name: None) if values else None)
    if as_json:
        emit_json(report.to_json())
        return
    show_facts(report)
    show_tensors(report)
    show_verbs(report)


def show_facts(report: Inspection) -> None:
    """What the model is."""
    from tqtool.cli.render import emit_table
    from tqtool.pipeline.preflight import readable_bytes

    sizes = report.sizes
    parameters = "unknown (foreign packing)" if report.parameters is None else f"{report.parameters:,}"
    types = ", ".join(f"{row.tensors} {row.dtype} ({readable_bytes(row.size_bytes)})" for row in report.types)
    caches = [
        f"{'bf16' if row.scheme == 'full' else row.scheme} {readable_bytes(1024 * row.bytes_per_token)}"
        for row in sizes.kv
        if row.bytes_per_token is not None
    ]
    refused = next((row for row in sizes.kv if row.refusal is not None and row.scheme.startswith("turbo")), None)
    shape = {
        "layers": sizes.layers,
        "hidden": sizes.hidden,
        "intermediate": sizes.intermediate,
        "heads": sizes.heads if sizes.heads == sizes.kv_heads else f"{sizes.heads} / {sizes.kv_heads} kv",
        "head size": sizes.head_dim,
        "vocabulary": sizes.vocabulary,
        "context": sizes.context,
    }
    rows = [
        ("origin", report.origin + (f" @ {report.revision}" if report.revision else "")),
        ("kind", report.kind if report.evidence is None else f"{report.kind}: {report.evidence}"),
        ("architecture", f"{report.architecture} (model_type {report.model_type})"),
        ("weights", f"{parameters} in {report.tensors} tensors, {readable_bytes(report.size_bytes)}"),
        ("stored as", f"{types}, {report.files} file{'s' if report.files != 1 else ''}"),
        ("shape", ", ".join(f"{name} {value}" for name, value in shape.items() if value is not None)),
        ("head", report.head),
        ("tokenizer", report.tokenizer),
        ("values", report.values or "not read (--values does)"),
        *([("kv cache", f"per 1024 tokens: {', '.join(caches)}")] if caches else []),
        *([("", f"no turbo: {refused.refusal}")] if refused else []),
        *(("warning", warning) for warning in report.warnings),
    ]
    emit_table(("", ""), rows, title=report.path)


def show_tensors(report: Inspection) -> None:
    """Every tensor, layers folded together, and what happens to it."""
    from tqtool.cli.render import emit_line, emit_table
    from tqtool.pipeline.preflight import readable_bytes

    plans = any(group.role for group in report.groups)
    columns: tuple[str, ...] = ("tensor", "n", "shape", "type", "size")
    rows: list[tuple[object, ...]] = []
    for group in report.groups:
        shape = "×".join(map(str, group.shape))
        row = (group.pattern.removesuffix(".weight"), group.count, shape, group.dtype, readable_bytes(group.size_bytes))
        rows.append((*row, group.role, group.convert, _short(group.rotate), group.trellis) if plans else row)
    if plans:
        columns = (*columns, "role", "convert -q", "--rotate-weights", "trellis, all modules")
    emit_line()
    emit_table(columns, rows)


def show_verbs(report: Inspection) -> None:
    """What each verb would do, what the results weigh, what the trellis pads."""
    from tqtool.cli.render import emit_line, emit_table
    from tqtool.pipeline.preflight import readable_bytes

    rows: list[tuple[object, ...]] = []
    reasons: set[str] = set()
    for row in report.verbs:
        detail = row.detail + (f" ({row.hint})" if row.hint else "")
        if not row.possible and row.detail in reasons:
            detail = "as above" + (f" ({row.hint})" if row.hint else "")
        reasons.add(row.detail)
        size = row.estimate
        figures = (
            ("", "", "", "", "")
            if size is None
            else (
                readable_bytes(size.tensor_bytes),
                f"{size.bits_per_weight:.3f}",
                readable_bytes(size.disk_bytes),
                readable_bytes(size.peak_memory_bytes),
                f"+ {readable_bytes(size.check_memory_bytes)}",
            )
        )
        rows.append((row.verb, "yes" if row.possible else "no", *figures, detail))
    emit_line()
    emit_table(("verb", "", "weights", "bits/weight", "disk", "memory", "check", "what it would do"), rows)
    for warning in dict.fromkeys(warning for row in report.verbs for warning in row.warnings):
        emit_line(f"warning: {warning}")
    if report.padding:
        emit_line()
        wasted = [row for row in report.padding if row.share >= WASTE_SHOWN]
        if not wasted:
            emit_line("trellis padding: under 0.05 % of every module")
            return
        padding = [
            (row.pattern, row.count, "×".join(map(str, row.shape)), row.layout, f"{100 * row.share:.2f} %")
            for row in wasted
        ]
        emit_table(("trellis padding", "n", "shape", "layout", "waste"), padding)


def _short(folds: str) -> str:
    """``diag(model.layers.*.input_layernorm.weight)`` → ``diag(input_layernorm)``: the layer is clear from the row."""
    return re.sub(r"[\w.*]*?(\w+)\.weight\)", r"\1)", folds)
