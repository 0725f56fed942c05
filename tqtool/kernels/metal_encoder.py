"""The encoder of the Metal kernels."""

from __future__ import annotations

from tqtool.kernels.encoder import Encoder
from tqtool.kernels.metal import on_device
from tqtool.kernels.metal_kernels import ENCODE_SOURCE, encode_blocks_at_once, encode_launch, encode_supports

METAL_ENCODER = Encoder(
    name="metal",
    source=lambda problem: ENCODE_SOURCE,
    supports=encode_supports,
    launch=encode_launch,
    blocks_at_once=encode_blocks_at_once,
    run=on_device,
)
