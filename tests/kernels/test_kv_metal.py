"""The kernels of packed KV on the table that all backends share: the text that MLX compiles, run lane by lane."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.support.kv_cases import TABLE, arrays_of, check, expected
from tests.support.metal.device import Shim
from tests.support.mlx_backend import to_mlx, to_numpy
from tqtool.kernels.kv_attention import KVAttention
from tqtool.kernels.metal import on_device
from tqtool.kv.array_codec import level_array, sign_array

EXECUTORS = ["lanes", "device"] if mx.metal.is_available() else ["lanes"]


@pytest.fixture(scope="session", params=EXECUTORS)
def attention(request, tmp_path_factory):
    return KVAttention(on_device if request.param == "device" else Shim(tmp_path_factory.mktemp("kv")))


def compute(case, arrays, attention):
    p = case.problem
    return to_numpy(
        attention(
            p,
            to_mlx(arrays.queries),
            mx.array(arrays.records),
            level_array(p.v_bits, "exact"),
            sign_array(p.head_dim),
            tokens=case.tokens,
            scale=arrays.scale,
        )
    )


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_result(case, attention):
    arrays = arrays_of(case)
    check(case, compute(case, arrays, attention), expected(case, arrays))
