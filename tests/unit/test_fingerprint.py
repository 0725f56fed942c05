"""Hashes of a checkpoint that read a part of it: what each sees and what it does not."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.tiny_models import Tiny, write_tiny
from tqtool.source import fingerprint as module
from tqtool.source.checkpoint import Checkpoint, TensorRef, open_checkpoint
from tqtool.source.fingerprint import fingerprint, sample

NAME = "model.embed_tokens.weight"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """One tensor of more than 1 MiB, beside small ones: 4230 x 128 in float32, a ragged number of pages."""
    return write_tiny(tmp_path / "source", Tiny(layers=1, vocab=4230, dtype="float32"), tokenizer=False)


def change(folder: Path, rows: slice, config: str = "") -> Checkpoint:
    """The checkpoint in ``folder`` after the embedding's ``rows`` got other values in place."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[NAME][rows] += np.float32(2.0**-20)
    save_file(tensors, file, metadata={"format": "pt"})
    if config:
        (folder / "config.json").write_text((folder / "config.json").read_text().replace("10000.0", config))
    return open_checkpoint(str(folder))


def test_a_fine_tune_of_large_matrices_alone_is_seen(large):
    before = open_checkpoint(str(large))
    assert before.tensors[NAME].nbytes > module.PIECES * module.PIECE_BYTES
    old, layout = fingerprint(before), before.content_hash()
    after = change(large, slice(None))
    assert fingerprint(after) != old
    assert after.content_hash() == layout


@pytest.mark.parametrize("rows", [slice(0, 1), slice(-1, None)])
def test_first_and_last_bytes_count(large, rows):
    old = fingerprint(open_checkpoint(str(large)))
    assert fingerprint(change(large, rows)) != old


def test_what_lies_between_the_pieces_is_not_read(large):
    """The docstring says so: a hash of a sample is no hash of the content."""
    old = fingerprint(open_checkpoint(str(large)))
    assert fingerprint(change(large, slice(100, 102))) == old


def test_the_config_counts(large):
    old = fingerprint(open_checkpoint(str(large)))
    assert fingerprint(change(large, slice(0, 0), config="10001.0")) != old


@pytest.mark.parametrize("size", [0, 1, 4096, 65536, 65537, 70001, 1 << 20])
def test_a_sample_is_bounded_and_no_byte_is_read_twice(tmp_path, size, monkeypatch):
    file = tmp_path / "f"
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    file.write_bytes(b"head" + content)
    ref = TensorRef(name="t", dtype=module.DType.U8, shape=(size,), path=file, begin=4, end=4 + size)
    spans: list[tuple[int, int]] = []
    read = TensorRef._read_bytes

    def counted(self: TensorRef, begin: int, end: int) -> object:
        spans.append((begin, end))
        return read(self, begin, end)

    monkeypatch.setattr(TensorRef, "_read_bytes", counted)
    found = sample(ref)
    assert len(found) == min(size, module.PIECES * module.PIECE_BYTES)
    assert (spans[0][0], spans[-1][1]) == (4, 4 + size)
    assert all(one[1] <= two[0] for one, two in pairwise(spans))
    assert found == b"".join(content[begin - 4 : end - 4] for begin, end in spans)
