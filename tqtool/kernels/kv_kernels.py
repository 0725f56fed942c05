"""Packed KV records on a GPU: what the kernels support and how they are launched. Pure functions.

``kv_encode`` makes records of new tokens. Attention is two launches: ``kv_attend`` reads keys and values of the records
once and leaves sums of splits of the tokens; ``kv_merge`` puts those together and rotates each query's sum back.
Metal's texts serve CUDA too (kernels/cuda/msl.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tqtool.errors import BackendError
from tqtool.kernels.problem import DTYPES, MAX_STREAM, Dtype, Launch, Output

HEAD_DIMS: Final = (64, 128, 256, 512)
KEY_BITS: Final = (2, 4, 5, 8)
VALUE_BITS: Final = (2, 3, 4, 5, 8)
SIMD: Final = 32
MOST_QUERIES: Final = 4
"""Queries of a KV head that a threadgroup does together, each with a copy of its sums in registers; more are pieces."""
MIN_SPLIT: Final = 64
"""Tokens of a split, at least: it costs a line of sums."""
WANTED_SIMDGROUPS: Final = 2112
"""What tokens are split for: sixteen for each of an H200's 132 processors, which is what 128 registers a lane let in at
once; fifty for each of 40 cores."""
MERGE_WARPS: Final = 8

ATTEND_SOURCE: Final = "metal/kv_attend.metal"
ATTEND_INPUTS: Final = ("q", "records", "levels", "factor", "dims")
MERGE_SOURCE: Final = "metal/kv_merge.metal"
MERGE_INPUTS: Final = ("parts", "signs", "root", "dims")
ENCODE_SOURCE: Final = "metal/kv_encode.metal"
ENCODE_INPUTS: Final = ("keys", "values", "signs", "edges", "root")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVProblem:
    """Attention of one token's queries over the records of a layer.

    Attributes:
        head_dim: Elements of a key, and of a value.
        k_bits: Of a key's code.
        v_bits: Of a value's code.
        queries: Query heads.
        heads: KV heads.
        room: Tokens that records have room for, of which the first are held.
        dtype: Of queries and result; sums are float32 whatever it is.

    Raises:
        BackendError: the queries are not shared equally by the KV heads, or there is no such dtype.
    """

    head_dim: int
    k_bits: int
    v_bits: int
    queries: int
    heads: int
    room: int
    dtype: Dtype

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise BackendError(f"KV attention: dtype {self.dtype!r}: expected one of {', '.join(DTYPES)}")
        if self.heads < 1 or self.queries < 1 or self.queries % self.heads:
            raise BackendError(f"KV attention: {self.queries} query heads are not shared by {self.heads} KV heads")

    @property
    def words(self) -> int:
        """Words of a record."""
        return self.head_dim * (self.k_bits + self.v_bits) // 32 + 3 * self.head_dim // 64

    @property
    def together(self) -> int:
        """Queries of a threadgroup."""
        most = MOST_QUERIES if self.head_dim < 512 else MOST_QUERIES // 2  # a lane has sixteen elements of each
        return min(most, self.queries // self.heads)

    @property
    def pieces(self) -> int:
        """Threadgroups that share the queries of a KV head."""
        return -(-(self.queries // self.heads) // self.together)

    @property
    def warps(self) -> int:
        """Simdgroups of a threadgroup: their sums must fit its memory."""
        return 8 if self.head_dim <= 128 else 4

    @property
    def splits(self) -> int:
        """Pieces that the tokens are cut into: by the room, so that a launch serves 256 tokens and more."""
        return max(1, min(WANTED_SIMDGROUPS // (self.warps * self.heads * self.pieces), self.room // MIN_SPLIT))


def supports(problem: KVProblem) -> str | None:
    """Why the kernels do not do ``problem``, or None."""
    if problem.head_dim not in HEAD_DIMS:
        return f"head dimension {problem.head_dim}: one of {', '.join(map(str, HEAD_DIMS))}"
    if problem.k_bits not in KEY_BITS or problem.v_bits not in VALUE_BITS:
        return f"k{problem.k_bits}v{problem.v_bits}: no such records"
    if problem.heads * problem.room * problem.words >= MAX_STREAM:
        return f"{problem.heads} heads with room for {problem.room} tokens: at most 2^31 - 1 words"
    return None


def encode_launch(rows: int, head_dim: int, k_bits: int, v_bits: int) -> Launch:
    """A simdgroup for each of ``rows`` tokens of heads; the rule is ``exact``."""
    words = head_dim * (k_bits + v_bits) // 32 + 3 * head_dim // 64
    return Launch(
        grid=(rows * SIMD, 1, 1),
        threadgroup=(SIMD, 1, 1),
        template=(("D", head_dim), ("KB", k_bits), ("VB", v_bits)),
        threadgroup_bytes=4 * 2 * head_dim,
        outputs=(Output((rows, words), "uint32"),),
        dims=(),
    )


def attend_launch(problem: KVProblem) -> Launch:
    """A threadgroup for each split, KV head and piece of its queries; outputs parts ``[splits, queries, d + 2]``."""
    together, warps, splits = problem.together, problem.warps, problem.splits
    threads = warps * SIMD
    return Launch(
        grid=(splits * threads, problem.heads * problem.pieces, 1),
        threadgroup=(threads, 1, 1),
        template=(
            ("T", problem.dtype),
            ("D", problem.head_dim),
            ("KB", problem.k_bits),
            ("VB", problem.v_bits),
            ("R", together),
            ("WARPS", warps),
        ),
        threadgroup_bytes=4 * ((1 << problem.v_bits) + warps * together * (problem.head_dim + 2)),
        outputs=(Output((splits, problem.queries, problem.head_dim + 2), "float32"),),
        dims=(),
    )


def attend_dims(problem: KVProblem, tokens: int) -> tuple[int, ...]:
    """What the kernel reads for ``tokens`` held; BackendError if there is no room for so many, or none."""
    if not 1 <= tokens <= problem.room:
        raise BackendError(f"KV attention: {tokens} tokens in records with room for {problem.room}")
    return tokens, problem.room, -(-tokens // problem.splits), problem.queries // problem.heads, problem.queries


def merge_launch(problem: KVProblem) -> Launch:
    """A threadgroup for every query."""
    threads = MERGE_WARPS * SIMD
    return Launch(
        grid=(problem.queries * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        template=(("T", problem.dtype), ("D", problem.head_dim), ("WARPS", MERGE_WARPS)),
        threadgroup_bytes=4 * MERGE_WARPS * (problem.head_dim + 2),
        outputs=(Output((problem.queries, problem.head_dim), problem.dtype),),
        dims=(problem.splits, problem.queries),
    )
