"""The kernels of packed KV on the table that all backends share: the text that MLX compiles, run lane by lane."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.support.kv_cases import NUMPY, TABLE, arrays_of, check, expected
from tests.support.metal.device import Shim
from tests.support.mlx_backend import to_mlx, to_numpy
from tests.unit.test_kv_codec import awkward, scheme
from tqtool.kernels.kv_attention import KVAttention
from tqtool.kernels.metal import on_device
from tqtool.kv import codec
from tqtool.kv.array_codec import edge_array, level_array, sign_array

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


@pytest.mark.parametrize(
    ("head_dim", "k_bits", "v_bits", "dtype"),
    [
        (64, 8, 3, "float32"),
        (128, 5, 5, "float32"),
        (256, 4, 8, "float32"),
        (512, 2, 4, "float32"),
        (64, 5, 2, "bfloat16"),
        (128, 8, 3, "float16"),
    ],
)
def test_bytes_of_the_encoder(head_dim, k_bits, v_bits, dtype, attention):
    """Those of numpy: of rows of all sizes, constants, ties, and values on boundaries."""
    rows = 20
    keys, values = (np.clip(rows_of[:rows], -6e4, 6e4).astype(NUMPY[dtype]) for rows_of in awkward(head_dim))
    found = encode(keys, values, k_bits, v_bits, attention)
    wanted = codec.encode(keys.astype(np.float32), values.astype(np.float32), scheme(k_bits, v_bits))
    np.testing.assert_array_equal(found, wanted)


def encode(keys, values, k_bits, v_bits, attention):
    head_dim = keys.shape[-1]
    tables = sign_array(head_dim), edge_array(v_bits, "exact")
    return np.array(attention.encode(to_mlx(keys), to_mlx(values), *tables, (k_bits, v_bits)))
