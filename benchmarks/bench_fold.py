"""How fast is the native Hadamard transform, against a dense float32 product with the same matrix?

    python benchmarks/bench_fold.py [--threads N --repeats 3 --json]

Each row folds one matrix in place along the rotated axis; the median of the repeats is printed with its range. The
dense product (numpy's BLAS, matrix already built) is what a fold without a fast transform would cost; it is timed in
the same run on at most 512 of the rows and scaled up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from tqtool.mathx.hadamard import hadamard_matrix, require_size
from tqtool.native import hadamard_transform

CASES = (((17408, 5120), 0), ((5120, 17408), 1), ((17408, 5120), 1), ((5120, 17408), 0), ((49152, 576), 1),
         ((151936, 896), 1), ((16384, 4096), 1))  # fmt: skip
DENSE_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured fold; GB = 1e9 bytes of the matrix, read and written once."""

    shape: tuple[int, int]
    axis: int
    factor: int
    threads: int
    median_s: float
    range_s: tuple[float, float]
    gb_per_s: float
    times_faster_than_dense: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for shape, axis in CASES:
        rows.append(_measure(shape, axis, options.threads, options.repeats))
        if not options.json:
            print(_line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))


def _measure(shape: tuple[int, int], axis: int, threads: int, repeats: int) -> Row:
    n = shape[axis]
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    times = [_time(lambda: hadamard_transform(x, axis=axis, out=x, threads=threads)) for _ in range(repeats)]
    matrix = hadamard_matrix(n).astype(np.float32) if n <= 8192 else np.ones((n, n), np.float32)
    count = min(DENSE_ROWS, shape[1 - axis])
    some = x[:count] if axis == 1 else np.ascontiguousarray(x[:, :count].T)
    dense = _time(lambda: some @ matrix) * shape[1 - axis] / count
    median = statistics.median(times)
    return Row(
        shape=shape,
        axis=axis,
        factor=require_size(n, what="n")[0],
        threads=threads,
        median_s=median,
        range_s=(min(times), max(times)),
        gb_per_s=x.nbytes / median / 1e9,
        times_faster_than_dense=dense / median,
    )


def _time(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _line(row: Row) -> str:
    what = f"{row.shape[0]:>6} x {row.shape[1]:<6} axis {row.axis}  m {row.factor:>3}"
    spread = f"{row.median_s:6.3f} s ({row.range_s[0]:.3f} to {row.range_s[1]:.3f})"
    return f"{what}  {spread}  {row.gb_per_s:5.2f} GB/s  {row.times_faster_than_dense:4.0f} x dense"


if __name__ == "__main__":
    main()
