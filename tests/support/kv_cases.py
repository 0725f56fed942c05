"""The cases of attention over packed KV that all backends share: bits, head dimensions, dtypes, shapes of heads.

Tokens are not multiples of anything: splits end early, rounds are not full, some splits may have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.oracles import kv as oracle
from tests.support.covering import pairwise
from tqtool.kernels.kv_kernels import KVProblem
from tqtool.kv import codec
from tqtool.kv.record import RecordLayout
from tqtool.kv.scheme import KVScheme

NUMPY: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNIT = 2.0**-24
ROUNDING = {"float32": UNIT, "float16": 2.0**-11, "bfloat16": 2.0**-8}
HEADS = {"one": (1, 1), "gqa3": (6, 2), "gqa7": (14, 2), "mqa9": (9, 1)}
TOKENS = {1: 256, 37: 256, 256: 256, 301: 512}


@dataclass(frozen=True)
class KVCase:
    """One problem, how many tokens are held, and what is special about them."""

    problem: KVProblem
    tokens: int
    special: str = ""
    seed: int = 0

    def __str__(self) -> str:
        p = self.problem
        shape = f"d{p.head_dim}-k{p.k_bits}v{p.v_bits}-{p.queries}x{p.heads}-t{self.tokens}-{p.dtype}"
        return shape + (f"-{self.special.replace(' ', '_')}" if self.special else "")


@dataclass(frozen=True)
class KVArrays:
    """What a kernel gets, and keys and rotated values as the oracle reads them, float64 ``[KV heads, tokens, d]``."""

    queries: NDArray[Any]
    records: NDArray[np.uint32]
    scale: float


def problem(head_dim=128, k_bits=8, v_bits=3, heads="gqa3", room=256, dtype="float32"):
    queries, kv_heads = HEADS[heads]
    return KVProblem(
        head_dim=head_dim, k_bits=k_bits, v_bits=v_bits, queries=queries, heads=kv_heads, room=room, dtype=dtype
    )


FACTORS = {
    "head_dim": [64, 128, 256, 512],
    "k_bits": [8, 5, 4, 2],
    "v_bits": [3, 2, 4, 5, 8],
    "heads": list(HEADS),
    "tokens": list(TOKENS),
    "dtype": ["float32", "float16", "bfloat16"],
}
SPECIALS = ["large scores", "one token has it all", "zeros"]


def _table() -> list[KVCase]:
    cases = []
    for seed, row in enumerate(pairwise(FACTORS)):
        tokens = row.pop("tokens")
        cases.append(KVCase(problem(room=TOKENS[tokens], **row), tokens, seed=seed))
    cases += [KVCase(problem(64, room=256), 200, special, seed=900 + n) for n, special in enumerate(SPECIALS)]
    return cases


TABLE = _table()


def scheme_of(p: KVProblem) -> KVScheme:
    return KVScheme(kind="turbo", k_bits=p.k_bits, v_bits=p.v_bits)


def arrays_of(case: KVCase) -> KVArrays:
    """Random keys and values, packed; what is beyond the tokens held is rubbish whose scales are NaN."""
    p, rng = case.problem, np.random.default_rng(case.seed)
    keys, values = rng.standard_normal((2, p.heads, case.tokens, p.head_dim)).astype(np.float32)
    queries = rng.standard_normal((p.queries, p.head_dim)).astype(np.float32)
    if case.special == "large scores":
        queries *= 400
    elif case.special == "one token has it all":
        keys[:, case.tokens // 2] *= 30
    elif case.special == "zeros":
        keys[...], values[...] = 0, 0
    records = np.full((p.heads, p.room, p.words), 0x7FFF7FFF, np.uint32)
    records[:, : case.tokens] = codec.encode(keys, values, scheme_of(p))
    return KVArrays(queries.astype(NUMPY[p.dtype]), records, p.head_dim**-0.5)


def expected(case: KVCase, arrays: KVArrays) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention in float64 over decoded records ``[queries, d]``, and how long a row's error may be ``[queries]``.

    No partial sum of q·k is above |q||k|, of codes and zeros apart above three times that; a score goes through at most
    80 roundings one after another (16 elements twice, the partial sums' tree, scaling). An error δ of a score changes
    its weight by δ of itself, so a row by at most 2δ of the longest value. Numerators: a rounding a token and a few a
    split. The result is rounded once, relative to itself.
    """
    p = case.problem
    layout = RecordLayout(p.head_dim, p.k_bits, p.v_bits)
    keys, rotated = codec.decode_rotated(arrays.records[:, : case.tokens], layout, "exact")
    queries = arrays.queries.astype(np.float64)
    turn = oracle.page_signs(p.head_dim)[:, None] * oracle.hadamard(p.head_dim) / np.sqrt(p.head_dim)
    values = rotated.astype(np.float64) @ turn.T
    output = oracle.attention(queries, keys, values, arrays.scale)
    lengths = np.repeat(np.linalg.norm(keys.astype(np.float64), axis=2).max(axis=1), p.queries // p.heads)
    longest = np.repeat(np.linalg.norm(values, axis=2).max(axis=1), p.queries // p.heads)
    score_error = 80 * UNIT * 3 * arrays.scale * np.linalg.norm(queries, axis=1) * lengths
    bound = longest * (2 * score_error + (case.tokens + 64) * UNIT)
    return output, bound + 2 * ROUNDING[p.dtype] * np.linalg.norm(output, axis=1) + 1e-30


def check(case: KVCase, found: NDArray[Any], right: tuple[NDArray[np.float64], NDArray[np.float64]]) -> None:
    output, bound = right
    error = np.linalg.norm(found.astype(np.float64) - output, axis=1)
    assert np.isfinite(error).all(), f"{case}: not finite"
    worst = np.argmax(error / bound)
    assert (error <= bound).all(), f"{case}: row {worst} is beyond the bound: {error[worst]:.3g} > {bound[worst]:.3g}"
