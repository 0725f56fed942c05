"""The CPU kernels on the table that all backends share; and the table itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support.covering import pairwise
from tests.support.trellis_cases import SPECIALS, TABLE
from tests.support.trellis_oracle import NUMPY, arrays_of, check, expected
from tqtool import native


def compute(case, arrays):
    """float32 kernels; the result is rounded to the dtype of the case."""
    dtype = NUMPY[case.problem.dtype]
    packed = [(m.words, m.scales, m.spec) for m in arrays.matrices]
    with np.errstate(over="ignore", invalid="ignore"):
        if case.problem.op == "expand":
            return native.trellis_expand(*packed[0]).astype(dtype)
        results = [native.trellis_matvec(*matrix, arrays.x.astype(np.float32)) for matrix in packed]
        if case.problem.op == "product":
            return results[0].astype(dtype)
        gate, up = results
        return (gate / (1 + np.exp(-gate)) * up).astype(dtype)


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_result(case):
    arrays = arrays_of(case)
    check(case, compute(case, arrays), expected(case, arrays))


def test_names_of_cases_are_unique():
    assert len({str(case) for case in TABLE}) == len(TABLE)


def test_every_special_value_is_met():
    assert {case.special for case in TABLE} == {"", *SPECIALS}


def test_pairwise_covers_every_pair():
    factors = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False], "d": [0, 1, 2, 3]}
    rows = pairwise(factors)
    assert len(rows) < 3 * 2 * 2 * 4 / 2
    for one, other in itertools.combinations(factors, 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(factors[one], factors[other]))


@pytest.mark.parametrize("error", ["one weight", "one scale", "one result"])
def test_the_bound_finds_one_wrong_element(error):
    """On the case with the longest sums, where the bound is widest."""
    case = max(
        (c for c in TABLE if not c.special and c.problem.op == "product" and c.problem.dtype == "float32"),
        key=lambda c: c.problem.spec.weight_shape[1],
    )
    arrays = arrays_of(case)
    right, matrix = expected(case, arrays), arrays.matrices[0]
    if error == "one weight":
        matrix.words.reshape(-1)[5] ^= 1 << 7
    elif error == "one scale":
        matrix.scales[-1] *= np.float16(1.01)
    found = compute(case, arrays)
    if error == "one result":
        found[0, -1] += 0.1  # of values around 20
    with pytest.raises(AssertionError, match="beyond the bound"):
        check(case, found, right)
