"""Does every CUDA kernel compute what it must, on the card that is here?

    python benchmarks/check_cuda.py [--jobs 12] [--slice I/N] [--quick]
    compute-sanitizer --tool memcheck python benchmarks/check_cuda.py --slice 0/1 --quick

The table that all backends share (tests/support/trellis_cases.py) through MLX, called as the runtime calls it, against
float64 with a bound that counts roundings. Cases of the tensor-core kernels run three times: with the geometry of the
product, as on a card of two processors, where thread blocks have whole rows of tiles and a part of what is left, and
with int8 activations, there against x rounded by the same rule. Longer shapes, of several slices, many blocks and
several rows of tiles a block, follow. Needs MLX's CUDA build; compiling is most of the time, so slices run in processes
of their own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.mlx_backend import compute
from tests.support.trellis_cases import TABLE, Case
from tests.support.trellis_oracle import arrays_of, check, expected, int8_rounded
from tqtool.formats.trellis import spec_for
from tqtool.kernels.backend import Backend
from tqtool.kernels.cuda import CUDA, cuda_backend
from tqtool.kernels.cuda_kernels import H200
from tqtool.kernels.problem import Problem

FEW = cuda_backend(replace(H200, processors=2))
"""Few thread blocks, each with many rows."""


@dataclass(frozen=True, slots=True)
class Run:
    """One case on one backend."""

    name: str
    case: Case
    backend: Backend

    def __str__(self) -> str:
        return f"{self.case} {self.name}"


def runs() -> Iterator[Run]:
    """All of them, in an order that gives every slice some of each kind."""
    for case in (*TABLE, *long_cases()):
        kernel = CUDA.choose(case.problem).kernel
        if kernel is None:
            continue
        yield Run("as chosen", case, CUDA)
        if kernel.source.startswith("cuda/"):
            yield Run("two processors", case, FEW)
            yield Run("int8", replace(case, problem=replace(case.problem, int8=True)), CUDA)


def long_cases() -> Iterator[Case]:
    """Shapes that the table has no time for on a CPU: more rows of tiles than blocks, inputs in several slices."""
    for number, (shape, m) in enumerate((((4208, 520), 1), ((100, 20000), 2), ((333, 20004), 4), ((2128, 1024), 3))):
        spec = spec_for(shape, k=1 + number, axis=1, tile=True)
        yield Case(Problem(spec=spec, m=m, dtype="float32"), seed=900 + number)
        yield Case(Problem(op="swiglu", spec=spec, m=m, dtype="bfloat16", up=spec), seed=950 + number)


def run_one(run: Run) -> None:
    """AssertionError, or whatever the call raises, if the result is wrong."""
    arrays = arrays_of(run.case)
    found = compute(run.case, arrays, run.backend)
    kernel = run.backend.choose(run.case.problem).kernel
    assert kernel is not None
    if kernel.source.startswith("cuda/"):
        finite = np.isfinite(arrays.x.astype(np.float32)).all(axis=1)
        if not finite.all():  # fixed point has no infinities: such a row gives NaN, the others feel nothing of it
            assert np.isnan(found[~finite].astype(np.float32)).all(), "a row that is not finite"
            assert np.isfinite(found[finite].astype(np.float32)).all(), "a row beside one that is not finite"
            return
    if run.case.problem.int8:
        check(run.case, found, expected(run.case, int8_rounded(arrays)))
        return
    check(run.case, found, expected(run.case, arrays))


def run_slice(number: int, of: int, *, quick: bool) -> bool:
    """Every ``of``-th run; ``quick`` takes one for each kernel, kind of run and number of bits."""
    good = bad = 0
    seen = set()
    for run in list(runs())[number::of]:
        kernel = run.backend.choose(run.case.problem).kernel
        kind = (kernel.name if kernel else "", run.name, run.case.problem.spec.k)
        if quick and kind in seen:
            continue
        seen.add(kind)
        try:
            run_one(run)
            good += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported and the others run
            bad += 1
            print(f"BAD {run}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
    print(f"slice {number}/{of}: {good} good, {bad} bad", flush=True)
    return bad == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=12, help="processes")
    parser.add_argument("--slice", help="I/N: only this slice, in this process")
    parser.add_argument("--quick", action="store_true", help="one case for each kernel, kind and number of bits")
    arguments = parser.parse_args()
    if arguments.slice:
        number, of = map(int, arguments.slice.split("/"))
        raise SystemExit(not run_slice(number, of, quick=arguments.quick))
    quick = ["--quick"] if arguments.quick else []
    jobs = arguments.jobs
    command = [sys.executable, __file__, *quick, "--slice"]
    started = [subprocess.Popen([*command, f"{number}/{jobs}"]) for number in range(jobs)]
    failed = sum(process.wait() != 0 for process in started)
    print(f"{len(list(runs()))} runs in {jobs} slices, {failed} slices with faults")
    raise SystemExit(failed != 0)


if __name__ == "__main__":
    main()
