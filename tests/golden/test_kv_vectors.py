"""The KV codec against what vllm-metal's makes of the same inputs (regen_kv.py): every byte, every decoded value."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from tests.golden.regen_kv import digest, inputs
from tqtool.kv import codec, record
from tqtool.kv.lloyd_max import boundaries, levels
from tqtool.kv.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS, KVScheme

GOLDEN = json.loads(Path(__file__).with_name("kv.json").read_text())
cached_inputs = lru_cache(inputs)


def stored_parts(case):
    scheme = KVScheme(kind="turbo", k_bits=case["k_bits"], v_bits=case["v_bits"], rule="vllm-metal")
    records = codec.encode(*cached_inputs(case["head_dim"]), scheme)
    layout = record.layout_of(scheme, case["head_dim"])
    parts = record.split(records, layout)
    codes = [
        np.ascontiguousarray(records[:, begin:end]).view(np.uint8)
        for begin, end in ((0, layout.affine_at), (layout.values_at, layout.scales_at))
    ]
    stored = (codes[0], parts.k_scales, parts.k_zeros, codes[1], parts.v_scales)
    return stored, codec.decode(records, case["head_dim"], scheme)


def test_every_pair_and_head_dimension_is_there():
    found = {(case["head_dim"], case["k_bits"], case["v_bits"]) for case in GOLDEN["cases"]}
    assert found == {(d, k, v) for d in HEAD_DIMS for k in KEY_BITS for v in VALUE_BITS}


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_tables(bits):
    assert GOLDEN["tables"][str(bits)] == [digest(levels(bits, "vllm-metal")), digest(boundaries(bits, "vllm-metal"))]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bytes_and_decoded_values(head_dim):
    for case in GOLDEN["cases"]:
        if case["head_dim"] != head_dim:
            continue
        stored, decoded = stored_parts(case)
        if "row_0" in case:
            assert [np.ascontiguousarray(array[0]).tobytes().hex() for array in stored] == case["row_0"], case
        assert digest(*stored) == case["stored"], case
        assert digest(*decoded) == case["decoded"], case


def test_a_constant_group_is_lost_there_and_kept_by_default():
    keys, values = cached_inputs(64)
    for rule, is_finite in (("vllm-metal", False), ("exact", True)):
        scheme = KVScheme(kind="turbo", k_bits=8, v_bits=3, rule=rule)
        decoded, _ = codec.decode(codec.encode(keys, values, scheme), 64, scheme)
        assert np.isfinite(decoded[1]).all() == is_finite
