"""Table and picture of the ladder, from the dictionary that ladder.json holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def print_table(report: dict[str, Any]) -> None:
    print(f"\n{report['model']}, {report['windows']} windows of {report['context']} tokens of {report['text']}")
    print("bpw: all bytes of the weight files over the weights of the source; linear: of the linear layers alone\n")
    head = ("arm", "MLP", "attention", "embedding", "head", "bpw", "linear", "MB", "KL ± se", "ppl", "top-1")
    lines = [head]
    for row in report["rows"]:
        score = row["score"]
        cells = tuple(row[column] for column in ("name", "mlp", "attention", "embedding", "head"))
        cells += (f"{row['bits_per_source_weight']:.2f}",)
        cells += (f"{row['bits_per_linear_weight']:.2f}", f"{row['weight_bytes'] / 1e6:.1f}")
        cells += (f"{score['kl']['mean']:.4f} ± {error(score['kl']):.4f}", f"{score['ppl']:.2f}")
        lines.append((*cells, f"{100 * score['top1']['mean']:.1f} %"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        left = [cell.ljust(width) for cell, width in zip(line[:5], widths[:5], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(line[5:], widths[5:], strict=True)]
        print("  ".join(left + right))
    print()
    if report["gguf"] is not None:
        print(origin(report["gguf"]) + "\n")


def origin(gguf: dict[str, Any]) -> str:
    """What the reader must know of a source that was decoded from a GGUF: it is no float model."""
    types = ", ".join(f"{count} {name}" for name, count in gguf["tensor_types"].items())
    megabytes = gguf["size_bytes"] / 1e6
    return (
        f"The source was decoded from {gguf['file']} ({types}): the same model in {megabytes:.1f} MB,\n"
        "KL 0 by construction. KL here is the distance to it, not to the float model behind it; and its weights lie\n"
        "on a grid, which a rotation leaves and plain rounding may profit from."
    )


def error(estimate: dict[str, Any]) -> float:
    """The larger standard error, over tokens or over windows."""
    return max(estimate["se_tokens"] or 0.0, estimate["se_windows"] or 0.0)


def plot(report: dict[str, Any], path: Path) -> None:
    """KL against the size of everything, and against the rate of the linear layers alone; a line per series."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    source, *rows = report["rows"]
    series: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        series.setdefault(row["series"], []).append(row)
    figure, (whole, linear) = plt.subplots(1, 2, figsize=(13, 5.5), sharey=True, layout="constrained")
    for (name, members), marker in zip(series.items(), "osD^vP", strict=False):
        draw(whole, name, marker, [(row["weight_bytes"] / 1e6, row) for row in members])
        draw(linear, name, marker, [(row["bits_per_linear_weight"], row) for row in members])
    if report["gguf"] is not None:
        size = report["gguf"]["size_bytes"] / 1e6
        whole.axvline(size, linestyle=":", color="gray")
        whole.annotate(
            f"the GGUF the source was decoded from: {size:.0f} MB, KL 0",
            (size, 0.02),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            xytext=(-4, 0),
            rotation=90,
            ha="right",
            fontsize=8,
        )
    whole.set_yscale("log")
    whole.set_xlabel("weight files, MB")
    whole.set_ylabel("mean KL to the source model, nats per token")
    linear.set_xlabel("bits per weight of the linear layers, scales included")
    for axes in (whole, linear):
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.margins(x=0.1)
    figure.legend(*linear.get_legend_handles_labels(), loc="outside lower center", ncols=len(series))
    figure.suptitle(
        f"{report['model']}: the source has {source['weight_bytes'] / 1e6:.0f} MB and KL 0. "
        f"{report['windows']} windows of {report['context']} tokens; bars are standard errors.\n"
        "Rotating a tied model gives it a head of its own: that counts on the left, not on the right.",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def draw(axes: Any, name: str, marker: str, points: list[tuple[float, dict[str, Any]]]) -> None:
    points.sort(key=lambda point: point[0])
    kls = [row["score"]["kl"] for _, row in points]
    axes.errorbar(
        [x for x, _ in points],
        [kl["mean"] for kl in kls],
        yerr=[error(kl) for kl in kls],
        marker=marker,
        markersize=7,
        capsize=3,
        label=name,
    )
    for x, row in points:
        short = row["mlp"].removesuffix(" g64").removeprefix("trellis ")
        axes.annotate(short, (x, row["score"]["kl"]["mean"]), textcoords="offset points", xytext=(7, 5), fontsize=8)
