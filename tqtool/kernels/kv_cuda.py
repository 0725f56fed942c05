"""The kernels of packed KV on CUDA: Metal's texts, through ``mx.fast.cuda_kernel``."""

from __future__ import annotations

from typing import Final

from tqtool.kernels.cuda import is_proven_here, on_device
from tqtool.kernels.cuda_kernels import METAL_ON_CUDA
from tqtool.kernels.kv_attention import KVAttention
from tqtool.kernels.kv_kernels import ATTEND_SOURCE, ENCODE_SOURCE, MERGE_SOURCE
from tqtool.kernels.sources import digest

KV_SOURCES: Final = (ATTEND_SOURCE, MERGE_SOURCE, ENCODE_SOURCE)
KV_THAT_RAN = "a75a59b8af285d2b"
"""Digest of the texts that passed ``benchmarks/bench_kv_decode.py --check`` on a card, which prints it. Other texts are
not taken there until they have."""


def kv_digest() -> str:
    """Of the texts as they stand."""
    return digest(KV_SOURCES, METAL_ON_CUDA)


CUDA_KV = KVAttention(on_device)


def is_kv_proven_here() -> bool:
    """Whether decoding may go through the kernels on the card that is here."""
    return is_proven_here() and kv_digest() == KV_THAT_RAN
