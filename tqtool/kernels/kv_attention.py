"""Calls of the kernels of packed KV on MLX arrays: the same for every backend whose kernels MLX launches."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from tqtool.errors import BackendError
from tqtool.kernels import kv_kernels as kv
from tqtool.kernels.backend import Call, Ready, Runner, dims_array
from tqtool.kernels.kv_kernels import KVProblem

LOG2_E = 1.4426950408889634


class KVAttention:
    """The kernels of a device, made ready once for each problem.

    Args:
        run: Carries calls out; tests put an executor in place of the device.
    """

    def __init__(self, run: Runner) -> None:
        self.run = run
        self._ready = lru_cache(maxsize=1024)(self._prepare)
        self._encoder = lru_cache(maxsize=256)(self._prepare_encoder)

    def __call__(
        self,
        problem: KVProblem,
        queries: mx.array,
        records: mx.array,
        levels: mx.array,
        signs: mx.array,
        *,
        tokens: int,
        scale: float,
    ) -> mx.array:
        """Attention of ``queries [heads, d]`` over the first ``tokens`` of ``records [KV heads, room, words]``.

        Args:
            problem: What shapes and dtypes the arrays have; anything else is refused.
            queries: Of one token.
            records: docs/formats/kv.md.
            levels: float32 ``[2^v_bits]``.
            signs: float32 ``[d]``.
            tokens: Held.
            scale: Of the scores.

        Raises:
            BackendError: no kernel, or arrays that are not of the problem.
        """
        expected = (
            (problem.queries, problem.head_dim),
            (problem.heads, problem.room, problem.words),
            (1 << problem.v_bits,),
            (problem.head_dim,),
        )
        found = tuple(array.shape for array in (queries, records, levels, signs))
        if found != expected or str(queries.dtype) != f"mlx.core.{problem.dtype}":
            raise BackendError(f"KV attention: {problem}: expected arrays of {expected}, found {found}")
        attend, merge = self._ready(problem)
        dims = dims_array(kv.attend_dims(problem, tokens))
        (parts,) = attend([queries, records, levels, _number(scale * LOG2_E), dims])
        root = _number(problem.head_dim**-0.5)
        (y,) = merge([parts, signs, root, dims_array((problem.splits, problem.queries))])
        return y

    def encode(
        self, keys: mx.array, values: mx.array, signs: mx.array, edges: mx.array, bits: tuple[int, int]
    ) -> mx.array:
        """Keys and values ``[..., d]`` of one dtype → records ``[..., words]``: the bytes of ``tqtool.kv.codec``.

        Args:
            keys: Finite, of a dtype that kernels read.
            values: Likewise.
            signs: float32 ``[d]``.
            edges: Boundaries between levels, float32 ``[2^v_bits - 1]``.
            bits: Of keys and of values.

        Raises:
            BackendError: shapes that do not fit, or bits that no kernel has.
        """
        head_dim, rows = keys.shape[-1], keys.size // keys.shape[-1]
        fits = keys.shape == values.shape and signs.shape == (head_dim,) and edges.shape == ((1 << bits[1]) - 1,)
        if not fits or head_dim not in kv.HEAD_DIMS or bits[0] not in kv.KEY_BITS or bits[1] not in kv.VALUE_BITS:
            raise BackendError(f"KV encoder: keys {keys.shape}, values {values.shape}, bits {bits}")
        run = self._encoder(rows, head_dim, *bits)
        (records,) = run([keys, values, signs, edges, _number(head_dim**-0.5)])
        return records.reshape(*keys.shape[:-1], records.shape[-1])

    def _prepare_encoder(self, rows: int, head_dim: int, k_bits: int, v_bits: int) -> Ready:
        return self.run(
            Call(
                name="kv_encode",
                source=kv.ENCODE_SOURCE,
                inputs=kv.ENCODE_INPUTS,
                outputs=("records",),
                launch=kv.encode_launch(rows, head_dim, k_bits, v_bits),
            )
        )

    def _prepare(self, problem: KVProblem) -> tuple[Ready, Ready]:
        reason = kv.supports(problem)
        if reason is not None:
            raise BackendError(f"KV attention: no kernel: {reason}")
        attend = Call(
            name="kv_attend",
            source=kv.ATTEND_SOURCE,
            inputs=kv.ATTEND_INPUTS,
            outputs=("parts",),
            launch=kv.attend_launch(problem),
        )
        merge = Call(
            name="kv_merge",
            source=kv.MERGE_SOURCE,
            inputs=kv.MERGE_INPUTS,
            outputs=("y",),
            launch=kv.merge_launch(problem),
        )
        return self.run(attend), self.run(merge)


@lru_cache(maxsize=64)
def _number(value: float) -> mx.array:
    return mx.array([value], mx.float32)
