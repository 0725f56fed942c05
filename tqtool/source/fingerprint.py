"""Which weights a measurement was made on: enough to tell two fine-tunes apart, without reading the large tensors."""

from __future__ import annotations

import hashlib
from typing import Final

from tqtool.source.checkpoint import Checkpoint

SMALL_BYTES: Final = 1 << 20


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 over the layout and the values of every tensor of up to 1 MiB (norms, biases, small matrices).

    Raises:
        SourceError: a file cannot be read.
    """
    digest = hashlib.sha256(checkpoint.content_hash().encode())
    for name in sorted(checkpoint.tensors):
        ref = checkpoint.tensors[name]
        if ref.nbytes <= SMALL_BYTES:
            digest.update(ref.read().tobytes())
    return digest.hexdigest()
