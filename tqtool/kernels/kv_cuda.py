"""The kernels of packed KV on CUDA: Metal's texts, through ``mx.fast.cuda_kernel``."""

from __future__ import annotations

from tqtool.kernels.cuda import is_proven_here, on_device
from tqtool.kernels.kv_attention import KVAttention

KV_HAS_RUN = False
"""Whether the texts, as they stand, have run on a card and passed (benchmarks/bench_kv_decode.py --check): set it then,
clear it with every change of them."""

CUDA_KV = KVAttention(on_device)


def is_kv_proven_here() -> bool:
    """Whether decoding may go through the kernels on the card that is here."""
    return KV_HAS_RUN and is_proven_here()
