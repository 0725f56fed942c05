"""Reasons and template parameters that the kernels of all backends have in common."""

from __future__ import annotations

from tqtool.formats.trellis import TrellisSpec
from tqtool.kernels.problem import MAX_STREAM, RUN, Dtype, Problem
from tqtool.mathx.codes import COMPUTED_CODES

MATVEC_ROWS = 4
"""Rows of x up to which a kernel decodes a weight once and multiplies it by all of them."""


def general_reason(problem: Problem, *ops: str) -> str | None:
    """Why no kernel for ``ops`` does ``problem``: another op, a code without formula, rows inside runs, sizes."""
    if problem.op not in ops:
        return f"does no {problem.op}"
    if problem.int8:
        return "takes no int8 activations"
    for spec in problem.specs:
        if spec.code not in COMPUTED_CODES:
            return f"code {spec.code} has no formula"
        if spec.n_blocks * spec.block >= MAX_STREAM:
            return f"{spec.n_blocks * spec.block} weights: at most 2^31 - 1"
        if problem.op != "expand" and spec.stride % RUN:
            return f"stride {spec.stride} is no multiple of {RUN}"
    if problem.m * max(problem.spec.weight_shape) >= MAX_STREAM:
        return f"{problem.m} rows of x: too many"
    return None


def rows_reason(problem: Problem, low: int, high: int) -> str | None:
    """Why a kernel for ``low`` to ``high`` rows of x does not do ``problem``."""
    return None if low <= problem.m <= high else f"m = {problem.m}: does {low} to {high} rows"


def matvec_reason(problem: Problem, layout: str, op: str) -> str | None:
    """Why a kernel of 1 to 4 rows of x that reads ``layout`` (``TrellisSpec.layout``) does not do ``problem``."""
    reason = general_reason(problem, op) or rows_reason(problem, 1, MATVEC_ROWS)
    if reason is None and any(spec.layout != layout for spec in problem.specs):
        reason = f"layout {', '.join(spec.layout for spec in problem.specs)}: reads {layout}"
    kinds = {(spec.code, spec.window, spec.stride) for spec in problem.specs}
    if reason is None and len(kinds) > 1:
        reason = "the two matrices differ in code, window or stride"
    return reason


def trellis_template(problem: Problem) -> tuple[tuple[str, int | Dtype], ...]:
    """T, K, L, CODE; the number of a code is ``TQ_CODE_…`` in kernels/common/constants.h."""
    spec = problem.spec
    return (("T", problem.dtype), ("K", spec.k), ("L", spec.window), ("CODE", COMPUTED_CODES.index(spec.code)))


def sizes(spec: TrellisSpec) -> tuple[int, int, int]:
    """What ``dims`` begins with: rows, columns and stride of the stored matrix."""
    return spec.rows, spec.cols, spec.stride


def up_of(problem: Problem) -> TrellisSpec:
    """The second matrix of a ``swiglu``."""
    assert problem.up is not None, "swiglu has two matrices"
    return problem.up
