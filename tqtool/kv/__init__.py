"""Quantized KV caches: how keys and values of past tokens are packed, kept and attended to.

Without a device: ``scheme`` (what is asked for, and its bytes), ``record`` (bytes of one token of one head), ``codec``
(keys and values ↔ records, numpy), ``lloyd_max`` and ``signs`` (constants). With MLX: ``array_codec`` (the same records
from MLX's operations), ``cache`` (mlx-lm's cache protocol), ``attention`` (attention over records), ``trace`` (what a
model asks of its caches).
"""
