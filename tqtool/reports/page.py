"""A comparison as one HTML file that needs nothing else: table, conditions, two pictures."""

from __future__ import annotations

import html
import io
from typing import Any

from tqtool.errors import BackendError
from tqtool.reports.compare import Arm, Comparison

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
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    rows = "".join(_row(arm) for arm in comparison.arms)
    facts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in comparison.conditions.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>tqtool compare</title>'
        f"<style>{STYLE}</style></head><body><h1>Quality and size</h1>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        '<p class="small">Shaded: no other arm is as small and as near to the teacher. KL in nats per token; bits per '
        f"weight over the source's weights.<br>{html.escape(facts)}</p>{picture(comparison)}</body></html>\n"
    )


def _row(arm: Arm) -> str:
    cells = (
        html.escape(arm.name),
        f"{arm.weight_bytes / 1e6:.1f}",
        f"{arm.bits_per_weight:.3f}",
        f"{arm.kl:.4f}",
        f"{arm.kl_se:.4f}",
        f"{arm.ppl:.3f}",
        f"{100 * arm.top1:.1f} %",
    )
    shade = ' class="frontier"' if arm.is_frontier else ""
    return f"<tr{shade}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def picture(comparison: Comparison) -> str:
    """KL and perplexity against size as SVG text; the frontier is drawn as a line."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise BackendError("the page needs matplotlib", hint="pip install 'tqtool[report]'") from error
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    # The file is the same for the same scores: no date, no random ids.
    with mpl.rc_context({"svg.hashsalt": "tqtool", "svg.fonttype": "none"}):
        figure, panels = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
        _draw(panels[0], "KL, nats per token", comparison, [arm.kl for arm in comparison.arms])
        _draw(panels[1], "perplexity", comparison, [arm.ppl for arm in comparison.arms])
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw(axes: Any, label: str, comparison: Comparison, values: list[float]) -> None:
    sizes = [arm.weight_bytes / 1e6 for arm in comparison.arms]
    edge = []
    for arm, size, value in zip(comparison.arms, sizes, values, strict=True):
        axes.plot(size, value, "o", color="#2a7f3f" if arm.is_frontier else "#999999")
        axes.annotate(arm.name, (size, value), textcoords="offset points", xytext=(6, 4), fontsize=8)
        if arm.is_frontier:
            edge.append((size, value))
    axes.plot([size for size, _ in edge], [value for _, value in edge], color="#2a7f3f", lw=1)
    axes.set_xlabel("weight files, MB")
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.25)
    if min(values) > 0:
        axes.set_yscale("log")
