"""Teacher dumps that were damaged or written wrongly; the dumps here are written by the safetensors library."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.oracles.divergence import log_softmax
from tqtool.errors import ArtifactError
from tqtool.formats.teacher import open_dump

V, W, C, K = 19, 2, 70, 5  # 69 positions: two whole blocks of 32 and a ragged one


def parts(*, top=K, bos=None):
    """Tensors and info of a right dump, from dense float64 sums."""
    rng = np.random.default_rng(4)
    logits = rng.integers(-20, 20, (W, C - 1, V)).astype(np.float32) / 2  # coarse, so that many are equal
    tokens = rng.integers(0, V, (W, C)).astype(np.uint32)
    if bos is not None:
        tokens[:, 0] = bos
    order = np.argsort(-logits, axis=-1, kind="stable")
    ranked = np.take_along_axis(logits, order, -1)
    exact = ranked.astype(np.float64)
    with np.errstate(divide="ignore"):
        tail = np.log(np.exp(exact[..., top:]).sum(-1))
    tensors = {
        "log_sum_exp": exact[..., 0] - log_softmax(ranked)[..., 0],
        "tail_log_sum_exp": tail,
        "tokens": tokens,
        "target_logits": np.take_along_axis(logits, tokens[:, 1:, None].astype(np.int64), -1)[..., 0],
        "top_ids": order[..., :top].astype(np.uint32),
        "top_logits": ranked[..., :top].copy(),
    }
    digest = "5" * 64
    info = {"model": "m", "model_hash": digest, "dtype": "float32", "text": "t", "text_sha256": digest}
    info |= {"tokenizer_hash": digest, "bos": bos, "vocab_size": V, "windows": W, "context": C, "top": top}
    return tensors, info | {"versions": {"tqtool": "0"}}


def write(path, tensors, info, *, hashed=True):
    """``hashed`` False leaves ``info`` without its own hashes: the caller brings them."""
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    if hashed:
        info = info | {"sha256": {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in tensors.items()}}
    text = info if isinstance(info, str) else json.dumps(info)
    metadata = {"format": "tqtool-teacher", "format_version": "1", "info": text}
    metadata["info_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    save_file(tensors, path, metadata)
    return path


def refuse(path, message):
    with pytest.raises(ArtifactError, match=message) as caught:
        open_dump(path)
    assert str(path) in str(caught.value)
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(("top", "bos"), [(K, None), (1, 3), (V, None), (V - 1, 0)])
def test_a_right_dump_opens(tmp_path, top, bos):
    tensors, info = parts(top=top, bos=bos)
    opened = open_dump(write(tmp_path / "d", tensors, info))
    for index in range(W):
        for name, array in tensors.items():
            np.testing.assert_array_equal(getattr(opened.window(index), name), array[index])


def test_windows_passed_over_are_a_condition_that_only_a_dump_with_some_states(tmp_path):
    tensors, info = parts()
    plain = open_dump(write(tmp_path / "d", tensors, info)).info
    behind = open_dump(write(tmp_path / "s", tensors, info | {"skip": 3})).info
    assert (plain.skip, behind.skip) == (0, 3)
    assert "skip" not in json.loads(plain.metadata()["info"])
    assert json.loads(behind.metadata()["info"])["skip"] == 3
    for wrong in (0, -1, 1.5, True, "3"):
        refuse(write(tmp_path / "w", tensors, info | {"skip": wrong}), "skip: expected a positive integer")


def test_every_flipped_bit_is_seen(tmp_path):
    """Every byte of the header, and one in thirteen of the rest."""
    data = write(tmp_path / "d", *parts()).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    path = tmp_path / "bad"
    rng = np.random.default_rng(0)
    for place in (*range(header), *range(header, len(data), 13)):
        bad = bytearray(data)
        bad[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        with pytest.raises(ArtifactError):
            open_dump(path)


def test_every_truncation_is_seen(tmp_path):
    data = write(tmp_path / "d", *parts()).read_bytes()
    for length in range(0, len(data), 101):
        (tmp_path / "bad").write_bytes(data[:length])
        with pytest.raises(ArtifactError):
            open_dump(tmp_path / "bad")


def test_the_hash_of_each_tensor_is_compared(tmp_path):
    tensors, info = parts()
    right = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in tensors.items()}
    for name in tensors:
        wrong = info | {"sha256": right | {name: "0" * 64}}
        refuse(write(tmp_path / name, tensors, wrong, hashed=False), f"tensor {name}: SHA-256 expected 000000000000")


BAD_VALUES = [
    ("tokens", (1, 40), V, f"window 1, token {V}: expected ids below vocab_size {V}"),
    ("tokens", (1, 0), 2**32 - 1, "window 1, token 4294967295"),
    ("top_ids", (1, 65, 2), V, "window 1, position 65: expected top_ids below vocab_size"),
    ("top_ids", (0, 3, 4), "first", "position 3: expected distinct top_ids"),
    ("top_ids", (0, 33), "swap", "position 33: expected top_logits that fall, equal ones by rising id"),
    ("top_logits", (0, 33), "reverse", "position 33: expected top_logits that fall"),
    ("top_logits", (0, 3, 4), np.nan, "position 3: expected finite top_logits"),
    ("top_logits", (0, 3, 0), np.inf, "position 3: expected finite top_logits"),
    ("top_logits", (0, 3, 0), 99.0, "position 3: expected"),
    ("log_sum_exp", (0, 68), np.nan, "position 68: expected a finite log_sum_exp"),
    ("log_sum_exp", (0, 68), -99.0, "position 68: expected log_sum_exp at or above the highest logit"),
    ("log_sum_exp", (0, 68), "more", "position 68: expected log_sum_exp of the top and the tail together"),
    ("tail_log_sum_exp", (0, 5), np.nan, "position 5: expected a finite tail_log_sum_exp, or -inf"),
    ("tail_log_sum_exp", (0, 5), np.inf, "position 5: expected a finite tail_log_sum_exp, or -inf"),
    ("tail_log_sum_exp", (0, 5), 50.0, "position 5: expected tail_log_sum_exp of ids below the top"),
    ("tail_log_sum_exp", (0, 5), "more", "position 5: expected log_sum_exp of the top and the tail together"),
    ("target_logits", (1, 7), np.nan, "window 1, position 7: expected a finite target_logits"),
    ("target_logits", (1, 7), 99.0, "window 1, position 7: expected target_logits of the token that follows"),
    ("target_logits", "listed", "more", "expected target_logits of the token that follows"),
]


@pytest.mark.parametrize(("name", "place", "value", "message"), BAD_VALUES)
def test_a_wrongly_written_dump(tmp_path, name, place, value, message):
    """The hashes are right here: only the values tell."""
    tensors, info = parts()
    array = tensors[name]
    if place == "listed":
        inside = (tensors["top_ids"] == tensors["tokens"][:, 1:, None]).any(-1)
        place = tuple(int(axis) for axis in np.argwhere(inside)[0])
    if value == "more":
        array[place] += 1e-6
    elif value == "reverse":
        array[place] = array[place][::-1].copy()
    elif value == "swap":  # the first two ids, whose logits are made equal first
        array[place][:2] = sorted(array[place][:2])[::-1]
        tensors["top_logits"][place][0] = tensors["top_logits"][place][1]
    elif value == "first":
        array[place] = array[place[:2]][0]
    else:
        array[place] = value
    refuse(write(tmp_path / "d", tensors, info), message)


def test_values_at_the_edges(tmp_path):
    tensors, info = parts(top=V)
    tensors["tail_log_sum_exp"][0, 1] = -50.0
    refuse(write(tmp_path / "tail", tensors, info), "position 1: expected tail_log_sum_exp of ids below the top, -inf")
    tensors, info = parts(bos=3)
    tensors["tokens"][1, 0] = 4
    refuse(write(tmp_path / "bos", tensors, info), "window 1, opens with token 4: expected bos 3")
    tensors, info = parts(top=V)
    tensors["tail_log_sum_exp"][:] = np.nan
    refuse(write(tmp_path / "nan", tensors, info), "finite tail_log_sum_exp, or -inf")


BAD_INFO = [
    *((name, value) for name in ("windows", "context", "top", "vocab_size") for value in (0, -1, "2", True, 2.0, None)),
    *((name, value) for name in ("model", "dtype", "text") for value in (None, 5, ["x"], "\ud800")),
    *((name, value) for name in ("model_hash", "text_sha256", "tokenizer_hash") for value in (5, "", "Z" * 64)),
    *(("bos", value) for value in (-1, V, True, "1", 1.0)),
    *(("versions", value) for value in (None, [], {"a": 1}, {"a": "\udfff"}, {"\ud800": "a"})),
    *(("sha256", value) for value in (None, {}, {"tokens": "x"}, {"tokens": "0" * 64})),
    ("windows", 2**70),
    ("windows", W + 1),
    ("context", 1),
    ("top", V + 1),
    ("model", "x\ud800" * 10_000),
]


@pytest.mark.parametrize(("name", "value"), BAD_INFO, ids=lambda value: ascii(value)[:30])
def test_every_field_of_the_info_is_checked(tmp_path, name, value):
    tensors, info = parts()
    hashes = {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in tensors.items()}
    wrong = info | {"sha256": hashes} | {name: value}
    expected = "tensor " if value == W + 1 else f"metadata 'info': {name}"
    refuse(write(tmp_path / "d", tensors, wrong, hashed=False), expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[" * 200_000, "is not JSON"),
        ("1" * 5000, "is not JSON"),
        ("[]", "expected the keys"),
        ("null", "expected the keys"),
        ('{"model": "m"}', "expected the keys"),
    ],
)
def test_info_that_is_none(tmp_path, text, message):
    refuse(write(tmp_path / "d", parts()[0], text, hashed=False), message)


def test_a_lone_surrogate_in_the_header(tmp_path):
    data = write(tmp_path / "d", *parts()).read_bytes()
    place = data.index(b'\\"model\\": \\"m\\"')
    header = data[8:place] + b"\\ud800" + data[place:]
    path = tmp_path / "bad"
    path.write_bytes((int.from_bytes(data[:8], "little") + 6).to_bytes(8, "little") + header)
    refuse(path, "is not JSON")


def test_a_dump_that_changes_after_it_was_opened(tmp_path):
    tensors, info = parts()
    path = write(tmp_path / "d", tensors, info)
    opened = open_dump(path)
    tensors["tokens"][1] = V + 5
    write(path, tensors, info)
    for read in (opened.tokens, opened.window):
        with pytest.raises(ArtifactError, match="window 1, token"):
            read(1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="window 1 cannot be read"):
        opened.window(1)
    path.unlink()
    with pytest.raises(ArtifactError, match="window 0 cannot be read"):
        opened.tokens(0)
