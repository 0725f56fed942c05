"""A comparison as one HTML file that needs nothing else: table, conditions, two pictures."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import Any

from tqtool.errors import BackendError
from tqtool.reports.compare import Arm, Comparison, facts
from tqtool.reports.tasks import columns_of

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100% } th, td { padding: .3rem .7rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr.frontier td { background: #eef7ee; font-weight: 600 }
th { border-bottom: 2px solid #999 } td { border-bottom: 1px solid #ddd } p.small { color: #666 } svg { width: 100% }
"""
COLUMNS = ("arm", "MB", "bits per weight", "KL", "± se", "perplexity", "same first token")


def page(comparison: Comparison) -> str:
    """The whole file.

    Raises:
        BackendError: matplotlib is not installed.
    """
    small = [
        "Shaded: no other arm is as small and as near to the teacher. KL in nats per token; bits per weight over the "
        "source's weights.",
        facts(comparison.conditions),
    ]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>tqtool compare</title>',
        f"<style>{STYLE}</style></head><body><h1>Quality and size</h1>",
        _table(COLUMNS, [(_cells(arm), arm.is_frontier) for arm in comparison.arms]),
        _small(small if comparison.conditions else ["Bits per weight over the source's weights."]),
        *_tasks(comparison),
        picture(comparison),
        "</body></html>\n",
    ]
    return "".join(parts)


def _tasks(comparison: Comparison) -> list[str]:
    columns = columns_of(score for arm in comparison.arms for score in arm.tasks)
    if not columns:
        return []
    rows = []
    for arm in comparison.arms:
        found = {score.column: score.text for score in arm.tasks}
        if found:
            rows.append(((arm.name, *(found.get(column, "–") for column in columns)), arm.name == comparison.baseline))
    paired = ""
    if comparison.baseline is not None:
        paired = f"; p: exact McNemar test against {comparison.baseline}, shaded"
    small = [f"% right [95 %, Wilson]{paired}", *map(facts, comparison.task_conditions)]
    return ["<h2>Tasks</h2>", _table(("arm", *(" ".join(column) for column in columns)), rows), _small(small)]


def _small(lines: Sequence[str]) -> str:
    return f'<p class="small">{"<br>".join(map(html.escape, lines))}</p>'


def _table(columns: Sequence[str], rows: Sequence[tuple[tuple[str, ...], bool]]) -> str:
    """``rows`` are cells and whether they are shaded; everything is escaped here."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = []
    for cells, shaded in rows:
        shade = ' class="frontier"' if shaded else ""
        body.append(f"<tr{shade}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _cells(arm: Arm) -> tuple[str, ...]:
    size = (arm.name, f"{arm.weight_bytes / 1e6:.1f}", f"{arm.bits_per_weight:.3f}")
    if (found := arm.distance) is None:
        return (*size, *["–"] * 4)
    return (*size, f"{found.kl:.4f}", f"{found.kl_se:.4f}", f"{found.ppl:.3f}", f"{100 * found.top1:.1f} %")


def picture(comparison: Comparison) -> str:
    """KL, perplexity and tasks against size as SVG text, as far as there are any; the frontier is drawn as a line."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise BackendError("the page needs matplotlib", hint="pip install 'tqtool[report]'") from error
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    near = [(arm, arm.distance) for arm in comparison.arms if arm.distance is not None]
    tasks = any(arm.tasks for arm in comparison.arms)
    count = 2 * bool(near) + tasks
    # The file is the same for the same scores: no date, no random ids.
    with mpl.rc_context({"svg.hashsalt": "tqtool", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(1, count, figsize=(6.5 * count, 5), layout="constrained", squeeze=False)
        panels = list(axes[0])
        if near:
            arms = [arm for arm, _ in near]
            _draw(panels[0], "KL, nats per token", arms, [distance.kl for _, distance in near])
            _draw(panels[1], "perplexity", arms, [distance.ppl for _, distance in near])
        if tasks:
            _draw_tasks(panels[-1], comparison)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw(axes: Any, label: str, arms: Sequence[Arm], values: list[float]) -> None:
    edge = []
    for arm, value in zip(arms, values, strict=True):
        size = arm.weight_bytes / 1e6
        axes.plot(size, value, "o", color="#2a7f3f" if arm.is_frontier else "#999999")
        axes.annotate(arm.name, (size, value), textcoords="offset points", xytext=(6, 4), fontsize=8)
        if arm.is_frontier:
            edge.append((size, value))
    axes.plot([size for size, _ in edge], [value for _, value in edge], color="#2a7f3f", lw=1)
    axes.set_ylabel(label)
    if min(values) > 0:
        axes.set_yscale("log")
    _finish(axes)


def _draw_tasks(axes: Any, comparison: Comparison) -> None:
    """One line a task and format, with the intervals."""
    for column in columns_of(score for arm in comparison.arms for score in arm.tasks):
        found = [(arm, score) for arm in comparison.arms for score in arm.tasks if score.column == column]
        rates = [score.rates[score.main] for _, score in found]
        below = [100 * (rate.value - rate.low) for rate in rates]
        above = [100 * (rate.high - rate.value) for rate in rates]
        sizes = [arm.weight_bytes / 1e6 for arm, _ in found]
        values = [100 * rate.value for rate in rates]
        axes.errorbar(sizes, values, yerr=[below, above], fmt="o-", lw=1, capsize=3, label=" ".join(column))
    axes.set_ylabel("% right")
    axes.legend(fontsize=8)
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.set_xlabel("weight files, MB")
    axes.grid(visible=True, alpha=0.25)
