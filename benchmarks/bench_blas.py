"""How much faster MLX's CPU float32 products are with the BLAS that tqtool puts in place.

Two child processes per round, one with ``ensure_blas`` and one without; GFLOP/s and the median ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

SHAPES = ((512, 576, 1536), (1024, 1024, 1024))

CHILD = """
import json, sys, time
report = None
if sys.argv[1] == "fast":
    from tqtool.runtime.blas import ensure_blas
    report = ensure_blas().library
import mlx.core as mx
rates = []
for m, k, n in json.loads(sys.argv[2]):
    a, b = mx.random.normal((m, k)), mx.random.normal((k, n))
    mx.eval(a, b, a @ b)
    best = 1e9
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(a @ b)
        best = min(best, time.perf_counter() - start)
    rates.append(2e-9 * m * k * n / best)
print(json.dumps({"rates": rates, "library": report}))
"""


def measure(mode: str) -> dict[str, object]:
    command = [sys.executable, "-c", CHILD, mode, json.dumps(SHAPES)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    pairs = [(measure("fast"), measure("stock")) for _ in range(arguments.rounds)]
    rows = []
    for index, (m, k, n) in enumerate(SHAPES):
        fast = [pair[0]["rates"][index] for pair in pairs]
        stock = [pair[1]["rates"][index] for pair in pairs]
        ratio = statistics.median(one / other for one, other in zip(fast, stock, strict=True))
        rows.append(
            {
                "m": m,
                "k": k,
                "n": n,
                "gflops_per_s": statistics.median(fast),
                "gflops_per_s_stock": statistics.median(stock),
                "ratio": ratio,
            }
        )
    if arguments.json:
        print(json.dumps({"library": pairs[0][0]["library"], "rows": rows}, indent=2))
        return
    for row in rows:
        print(
            f"[{row['m']}x{row['k']}] x [{row['k']}x{row['n']}]: {row['gflops_per_s']:.1f} GFLOP/s, "
            f"stock {row['gflops_per_s_stock']:.1f}, ratio {row['ratio']:.0f}"
        )


if __name__ == "__main__":
    main()
