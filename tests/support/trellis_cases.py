"""The table of cases that every backend's trellis kernels must pass: CPU, Metal, CUDA.

A case is a problem (``tqtool.kernels.problem``), a way to fill its arrays, and a seed. ``TABLE`` covers every pair of
values of: layout, k, code, window, rows of x, dtype and shape, for products of 1–4 and of 5–32 rows, for the fused
pair (both k), and for ``expand``; so each kernel meets every value of every template parameter, and every two of
them together. On top of that each layout meets every special value, with few and with many rows of x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.covering import pairwise
from tqtool.formats.trellis import TrellisSpec, spec_for
from tqtool.kernels.problem import DTYPES, Problem
from tqtool.mathx.codes import COMPUTED_CODES

LAYOUTS: dict[str, dict[str, Any]] = {
    "axis1": {"axis": 1},
    "axis1-padded": {"axis": 1, "pad_rows": True},
    "axis0": {"axis": 0},
    "axis0-padded": {"axis": 0, "pad_rows": True},
    "tile": {"axis": 1, "tile": True},
}
SHAPES: dict[str, tuple[int, int]] = {
    "one row": (1, 264),
    "one column": (19, 1),
    "narrow": (21, 24),  # blocks run on across rows, the last one is padded
    "whole": (16, 512),
    "many rows": (259, 40),  # two rows a simdgroup, the last one alone
    "ragged": (35, 300),
    "long": (131, 520),  # two splits; more than 32 squares in a strip, no multiple of eight
}
"""Stored rows and columns."""

SPECIALS = (
    "zero scales",
    "largest scale",
    "smallest scale",
    "negative scale",
    "inf in x",
    "nan in x",
    "inf meets zero scale",
    "zero x",
    "large x",
)

_TRELLIS: dict[str, Any] = {"k": (1, 2, 3, 4), "code": COMPUTED_CODES, "window": (12, 14, 16)}


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table; ``special`` is a name in ``SPECIALS`` or empty."""

    problem: Problem
    special: str = ""
    seed: int = 0

    def __str__(self) -> str:
        p, spec = self.problem, self.problem.spec
        padded = "p" if spec.stride > spec.cols and not spec.tile else ""
        bits = f"k{spec.k}" + (f"+{p.up.k}" if p.up else "")
        text = (
            f"{p.op}-{spec.layout}{padded}-{spec.rows}x{spec.cols}-{bits}-{spec.code}-L{spec.window}-m{p.m}-{p.dtype}"
        )
        return f"{text}-{self.special.replace(' ', '_')}" if self.special else text


def make_spec(layout: str, shape: str, **trellis: Any) -> TrellisSpec:
    """Spec of a stored shape; columns are rounded up to 8 where a row that is not padded would end inside a run."""
    rows, cols = SHAPES[shape]
    if layout in ("axis1", "axis0"):
        cols = -(-cols // 8) * 8
    options = LAYOUTS[layout]
    return spec_for((cols, rows) if options["axis"] == 0 else (rows, cols), **options, **trellis)


def _products(rows: tuple[int, ...]) -> list[Problem]:
    factors = {"layout": LAYOUTS, "shape": SHAPES, "m": rows, **_TRELLIS, "dtype": DTYPES}
    return [_problem("product", **row) for row in pairwise({name: list(values) for name, values in factors.items()})]


def _pairs() -> list[Problem]:
    factors = {
        "layout": ("axis1", "axis1-padded", "tile"),
        "shape": SHAPES,
        "m": (1, 2, 3, 4),
        **_TRELLIS,
        "up_k": (1, 2, 3, 4),
        "dtype": DTYPES,
    }
    return [_problem("swiglu", **row) for row in pairwise({name: list(values) for name, values in factors.items()})]


def _expansions() -> list[Problem]:
    factors = {"layout": LAYOUTS, "shape": SHAPES, **_TRELLIS, "dtype": DTYPES}
    rows = pairwise({name: list(values) for name, values in factors.items()})
    # Rows that end inside a run: only expand takes these.
    odd = [
        Problem(op="expand", spec=spec_for((33, 31), k=k, axis=axis, window=16), m=0, dtype="bfloat16")
        for k, axis in ((1, 1), (2, 0), (3, 1), (4, 0))
    ]
    return [_problem("expand", m=0, **row) for row in rows] + odd


def _problem(
    op: Any, *, layout: str, shape: str, m: int, k: int, code: Any, window: int, dtype: Any, up_k: int | None = None
) -> Problem:
    spec = make_spec(layout, shape, k=k, code=code, window=window)
    up = None if up_k is None else make_spec(layout, shape, k=up_k, code=code, window=window)
    return Problem(op=op, spec=spec, m=m, dtype=dtype, up=up)


def _special_cases() -> list[Case]:
    cases = []
    for number, layout in enumerate(LAYOUTS):
        # One set of parameters for each layout: what is compiled once serves all special values.
        spec = make_spec(layout, "narrow", k=1 + number % 4, code=COMPUTED_CODES[number % 3])
        # Two rows of x at least: one of them must not feel what is in the other.
        cases += [
            Case(Problem(spec=spec, m=m, dtype=DTYPES[number % 3]), special) for special in SPECIALS for m in (2, 9)
        ]
    for layout in ("axis1", "tile"):
        for special in SPECIALS:
            spec = make_spec(layout, "narrow", k=3)
            cases.append(Case(Problem(op="swiglu", spec=spec, m=2, dtype="float32", up=spec), special))
    return cases


def _table() -> tuple[Case, ...]:
    problems = [*_products((1, 2, 3, 4)), *_products((5, 8, 9, 16, 17, 24, 25, 32)), *_pairs(), *_expansions()]
    return tuple(Case(problem, seed=seed) for seed, problem in enumerate(problems)) + tuple(_special_cases())


TABLE = _table()
