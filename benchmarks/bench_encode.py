"""How fast is the trellis encoder, and how good?  ``python benchmarks/bench_encode.py --backend cpu --json``.

``--backend cuda`` (or ``metal``) times the GPU's kernel (``encode_on_gpu.py``), first blocks against the CPU's states;
then ``--mlp`` a whole synthetic MLP, ``--ldlq 17408x5120x1`` feedback on so many weights of a shape. No peer there.

On the CPU:

Peer: the same two-pass tail-biting search (QTIP's Algorithm 4) written here in torch, batched the way QTIP batches it:
one gather, add and min over the 2^k predecessors per step for many blocks at once. Both run in one process,
interleaved A B A; rates are medians, the ratio is the median of paired ratios. Both code the same Gaussian blocks, and
the peer must find paths of the same cost before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time

import numpy as np

from tqtool import native
from tqtool.formats.trellis import BLOCK
from tqtool.mathx import codes

PEER_BLOCKS = 256


def torch_encode(x: np.ndarray, levels: np.ndarray, window: int, k: int) -> np.ndarray:
    """States ``[n, T]`` of blocks ``x``: Algorithm 4 in torch, costs per suffix, float32 integers: exact."""
    import torch

    n, block = x.shape
    n_suffixes, n_choices = 1 << (window - k), 1 << k
    value = torch.from_numpy(levels.astype(np.float32))
    before = (torch.arange(1 << window) >> k).reshape(n_choices, n_suffixes)

    def search(inputs: torch.Tensor, seam: torch.Tensor | None, keep_from: int) -> torch.Tensor:
        cost = torch.zeros(n, n_suffixes) if seam is None else torch.full((n, n_suffixes), torch.inf)
        if seam is not None:
            cost[torch.arange(n), seam] = 0
        history = []
        for t in range(inputs.shape[1]):
            step = (inputs[:, t, None] - value).square_().reshape(n, n_choices, n_suffixes)
            cost, choice = (step + cost[:, before]).min(dim=1)
            cost -= cost.min(dim=1, keepdim=True).values
            if t >= keep_from:
                history.append(choice.to(torch.uint8))
        suffix = cost.argmin(dim=1) if seam is None else seam
        states = torch.empty(n, len(history), dtype=torch.int64)
        for t in range(len(history) - 1, -1, -1):
            choice = history[t].gather(1, suffix[:, None])[:, 0].to(torch.int64)
            states[:, t] = choice * n_suffixes + suffix
            suffix = states[:, t] >> k
        return states

    inputs = torch.from_numpy(x.astype(np.float32))
    half = block // 2
    first = search(torch.roll(inputs, half, dims=1), None, half)
    return search(inputs, first[:, 0] >> k, 0).numpy().astype(np.uint16)


def cost_of(x: np.ndarray, states: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Integer cost of each block's path."""
    return ((levels[states].astype(np.int64) - x) ** 2).sum(axis=1)


def timed(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(k: int, args: argparse.Namespace) -> dict[str, object]:
    levels, scale = codes.levels(args.code, args.window), codes.CODE_SCALE[k]
    source = np.random.default_rng(k).standard_normal((args.blocks, BLOCK), np.float32)
    x = np.clip(np.rint(source * np.float32(codes.UNIT[args.code] * scale)), -560, 560).astype(np.int16)
    options = {"window": args.window, "k": k, "warmup": args.warmup, "threads": args.threads}

    states, name = native.viterbi_encode(x, levels, **options)
    mse = float(np.mean((source - codes.values(args.code, args.window)[states] / np.float32(scale)) ** 2))
    peer_x = x[:PEER_BLOCKS]
    if args.warmup is None and not args.no_peer:
        found = torch_encode(peer_x, levels, args.window, k)
        if not np.array_equal(cost_of(peer_x, found, levels), cost_of(peer_x, states[:PEER_BLOCKS], levels)):
            sys.exit("the torch peer finds paths of another cost: no comparison")

    ours, peers, ratios = [], [], []
    for _ in range(args.repeats):
        a1 = timed(lambda: native.viterbi_encode(x, levels, **options))
        if not args.no_peer:
            b = timed(lambda: torch_encode(peer_x, levels, args.window, k)) * len(x) / len(peer_x)
            a2 = timed(lambda: native.viterbi_encode(x, levels, **options))
            peers.append(b)
            ratios.append(b / ((a1 + a2) / 2))
            ours += [a1, a2]
        else:
            ours.append(a1)
    rate = [x.size / seconds / 1e6 for seconds in ours]
    row: dict[str, object] = {
        "backend": "cpu",
        "instruction_set": name,
        "k": k,
        "window": args.window,
        "code": args.code,
        "scale": scale,
        "warmup": args.warmup,
        "threads": args.threads or os.cpu_count(),
        "weights": x.size,
        "mw_per_s": statistics.median(rate),
        "mw_per_s_min": min(rate),
        "mw_per_s_max": max(rate),
        "mse": mse,
    }
    if peers:
        row["torch_mw_per_s"] = x.size / statistics.median(peers) / 1e6
        row["ratio_to_torch"] = statistics.median(ratios)
        row["ratio_min"], row["ratio_max"] = min(ratios), max(ratios)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["cpu", "cuda", "metal"], default="cpu")
    parser.add_argument("--k", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--window", type=int, default=12)
    parser.add_argument("--code", default="mul1", choices=codes.CODES)
    parser.add_argument("--warmup", type=int, default=None, help="short first pass; the peer always runs Algorithm 4")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--compare", type=int, default=1024, help="on a GPU: blocks held against the CPU's states")
    parser.add_argument(
        "--mlp", type=int, nargs="?", const=0, default=None, help="on a GPU: weights, 0 for all of a 27B's"
    )
    parser.add_argument("--ldlq", nargs="*", default=[], metavar="OUTxINxN", help="on a GPU: N weights of a shape")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.backend != "cpu":
        from encode_on_gpu import measure as measure_on_gpu

        for row in measure_on_gpu(args):
            print(json.dumps(row))
        return
    load = os.getloadavg()[0]
    rows = [measure(k, args) for k in args.k]
    report = {"machine": platform.machine(), "cores": os.cpu_count(), "load_before": load, "rows": rows}
    if args.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f} before the run")
    for row in rows:
        peer = ""
        if "ratio_to_torch" in row:
            peer = f", {row['ratio_to_torch']:.0f}x torch ({row['ratio_min']:.0f}-{row['ratio_max']:.0f})"
        print(
            f"k={row['k']} L={row['window']} {row['code']}: {row['mw_per_s']:.2f} Mw/s "
            f"({row['mw_per_s_min']:.2f}-{row['mw_per_s_max']:.2f}), mse {row['mse']:.5f}{peer}"
        )


if __name__ == "__main__":
    main()
