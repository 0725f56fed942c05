"""Hadamard matrices of order n = m·2^k (first part: sizes)."""

from __future__ import annotations


def require_size(n: int, *, what: str) -> None:
    """Raise UserError if no Hadamard matrix of order ``n`` can be built."""
    del n, what
