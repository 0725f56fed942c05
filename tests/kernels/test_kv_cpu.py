"""The CPU kernels of packed KV: the encoder's bytes, decoded values, attention on the table that all backends share."""

from __future__ import annotations

import itertools
import platform

import numpy as np
import pytest

from tests.support.kv_cases import NUMPY, TABLE, arrays_of, check, expected
from tests.unit.test_kv_codec import awkward, scheme
from tqtool import native
from tqtool.errors import BackendError
from tqtool.kv import codec, record
from tqtool.kv.lloyd_max import boundaries, levels
from tqtool.kv.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS
from tqtool.kv.signs import signs

SETS = ["scalar", "avx2", "avx512"] if platform.machine() == "x86_64" else ["scalar"]


def available():
    """Instruction sets of this machine."""
    found = []
    for name in SETS:
        try:
            encode(*awkward(64), scheme(), force=name)
        except BackendError:
            continue
        found.append(name)
    return found


def encode(keys, values, chosen, **options):
    layout = record.layout_of(chosen, keys.shape[-1])
    bits = chosen.k_bits, chosen.v_bits
    edges = boundaries(chosen.v_bits, "exact")
    return native.kv_encode(
        keys, values, signs=signs(keys.shape[-1]), boundaries=edges, bits=bits, words=layout.words, **options
    )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bytes_and_decoded_values(head_dim):
    keys, values = awkward(head_dim)
    for k_bits, v_bits in itertools.product(KEY_BITS, VALUE_BITS):
        chosen = scheme(k_bits, v_bits)
        wanted = codec.encode(keys, values, chosen)
        decoded = codec.decode_rotated(wanted, record.layout_of(chosen, head_dim), "exact")
        for force in available():
            found = encode(keys, values, chosen, force=force)
            np.testing.assert_array_equal(found, wanted, err_msg=f"{chosen.name} {force}")
            read = native.kv_decode(
                wanted[None], 33, head_dim=head_dim, levels=levels(v_bits, "exact"), bits=(k_bits, v_bits), force=force
            )
            for one, other in zip(read, decoded, strict=True):
                np.testing.assert_array_equal(one[0], other[:33])


def compute(case, arrays, **options):
    p = case.problem
    found = native.kv_attend(
        arrays.queries.astype(np.float32),
        arrays.records,
        case.tokens,
        levels=levels(p.v_bits, "exact"),
        signs=signs(p.head_dim),
        bits=(p.k_bits, p.v_bits),
        scale=arrays.scale,
        **options,
    )
    return found.astype(NUMPY[p.dtype])


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_attention(case):
    arrays = arrays_of(case)
    found = compute(case, arrays)
    check(case, found, expected(case, arrays))
    for options in ({"threads": 1}, {"threads": 3}, *({"force": name} for name in available())):
        np.testing.assert_array_equal(compute(case, arrays, **options), found)


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-24, 2.0**-25, 2.0**-15, 1.5 * 2.0**-24, 65504.0, 65519.0, 65520.0])
def test_halves_of_scales(value):
    """Constant groups whose scale is that number, through a record and back."""
    keys = np.full((1, 64), np.float32(value) * np.float32(127))
    keys[0, ::2] *= -1
    np.testing.assert_array_equal(encode(keys, keys, scheme()), codec.encode(keys, keys, scheme()))


def test_what_does_not_fit_is_refused():
    odd = np.zeros((2, 96), np.float32)
    edges, ones = boundaries(3, "exact"), np.ones(96, np.float32)
    with pytest.raises(BackendError, match="expected 64, 128"):
        native.kv_encode(odd, odd, signs=ones, boundaries=edges, bits=(8, 3), words=10)
    case = TABLE[0]
    arrays = arrays_of(case)
    for change, message in (
        ({"tokens": 0}, "tokens"),
        ({"tokens": case.problem.room + 1}, "tokens"),
        ({"bits": (3, 3)}, "key bits"),
        ({"bits": (8, 6)}, "value bits"),
    ):
        options = {"tokens": case.tokens, "bits": (case.problem.k_bits, case.problem.v_bits)} | change
        with pytest.raises(BackendError, match=message):
            native.kv_attend(
                arrays.queries.astype(np.float32),
                arrays.records,
                options["tokens"],
                levels=levels(case.problem.v_bits, "exact"),
                signs=signs(case.problem.head_dim),
                bits=options["bits"],
                scale=1.0,
            )
