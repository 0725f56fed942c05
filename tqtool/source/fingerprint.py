"""Which weights a measurement was made on, without reading all of them.

``fingerprint`` is what calibration folders carry: it tells apart what was trained from end to end, and not a fine-tune
that touched large matrices only (a merged LoRA leaves norms and biases as they were). ``sample_hash`` reads a little of
every tensor and tells those apart too.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Final

from tqtool.formats.dtypes import DType
from tqtool.source.checkpoint import Checkpoint, TensorRef

SMALL_BYTES: Final = 1 << 20

PIECES: Final = 16
PIECE_BYTES: Final = 1 << 12
"""A page of most disks: less would be read as slowly. 27B parameters in 800 tensors are 50 MB in 13 000 reads."""


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 over the layout and the values of every tensor of up to 1 MiB (norms, biases, small matrices).

    Two checkpoints that differ in larger tensors alone have one fingerprint.

    Raises:
        SourceError: a file cannot be read.
    """
    digest = hashlib.sha256(checkpoint.content_hash().encode())
    for name in sorted(checkpoint.tensors):
        ref = checkpoint.tensors[name]
        if ref.nbytes <= SMALL_BYTES:
            digest.update(ref.read().tobytes())
    return digest.hexdigest()


def sample_hash(checkpoint: Checkpoint) -> str:
    """SHA-256 over the layout and a ``sample`` of every tensor.

    Raises:
        SourceError: a file cannot be read.
    """
    digest = hashlib.sha256(checkpoint.content_hash().encode())
    for name in sorted(checkpoint.tensors):
        digest.update(sample(checkpoint.tensors[name]))
    return digest.hexdigest()


def sample(ref: TensorRef) -> bytes:
    """Up to 64 KiB of a tensor: all of a small one, else 16 pieces of 4 KiB, the first and the last bytes among them.

    Any training changes far more than one value in ten thousand of a tensor that it touches, and is seen; an edit of a
    few values or rows may lie between the pieces.

    Raises:
        SourceError: the file cannot be read.
    """
    flat = replace(ref, dtype=DType.U8, shape=(ref.nbytes,))
    if ref.nbytes <= PIECES * PIECE_BYTES:
        return flat.read().tobytes()
    last = ref.nbytes - PIECE_BYTES
    starts = [index * last // (PIECES - 1) for index in range(PIECES)]
    return b"".join(flat.read_rows(start, start + PIECE_BYTES).tobytes() for start in starts)
