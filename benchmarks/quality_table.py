"""The rows of ``bench_quality.py`` as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = ("arm", "linear bpw", "bpw", "MB", "KL ± se", "ppl", "top-1", "minutes", "how")


def table(conditions: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: arms that were scored from small to large by bits of the linear layers, then those that were not."""
    scored = [row for row in rows if "failed" not in row]
    scored.sort(key=lambda row: (row["linear_bits_per_weight"], row["score"]["kl"]["mean"]))
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in scored]
    for row in (row for row in rows if "failed" in row):
        reason = " ".join(str(row["failed"]).replace("|", "/").split())
        blank = ["–"] * (len(COLUMNS) - 3)
        lines.append("| " + " | ".join((row["name"], *blank, f"{row['minutes']:.1f}", f"not run: {reason}")) + " |")
    teacher = f", source perplexity {scored[0]['score']['teacher_ppl']:.2f}" if scored else ""
    versions = ", ".join(f"{name} {version}" for name, version in conditions["versions"].items())
    facts = (
        f"{conditions['model']}, {conditions['text']}: calibration {conditions['calibration']}, scored "
        f"{conditions['scored']}{teacher}; {versions}; BLAS threads: {conditions['threads']}."
    )
    return "\n".join((*lines, "", facts)) + "\n"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a scored row."""
    kl, top1 = row["score"]["kl"], row["score"]["top1"]
    error = max((value for value in (kl["se_windows"], kl["se_tokens"]) if value is not None), default=0.0)
    said = "; ".join(row["facts"].get("said", ()))
    return (
        row["name"],
        f"{row['linear_bits_per_weight']:.3f}",
        f"{row['bits_per_weight']:.3f}",
        f"{row['weight_bytes'] / 1e6:.1f}",
        f"{kl['mean']:.4f} ± {error:.4f}",
        f"{row['score']['ppl']:.2f}",
        f"{100 * top1['mean']:.1f} %",
        "–" if row["minutes"] is None else f"{row['minutes']:.1f}",
        (row["how"] + (f" ({said})" if said else "")).replace("|", "/"),
    )
