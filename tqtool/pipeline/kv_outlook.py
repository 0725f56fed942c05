"""What KV caches would take, from the sizes that a config states; ``tqtool.kv.cache`` asks a loaded model instead."""

from __future__ import annotations

from dataclasses import dataclass

from tqtool.kv.scheme import full_bytes_per_token, parse_scheme

SHOWN = ("affine8", "affine4", "turbo:k8v8", "turbo:k8v4", "turbo:k8v3", "turbo:k4v3")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRow:
    """One KV cache: bytes a token in all layers whose cache grows, or why there is none of this scheme."""

    scheme: str
    bytes_per_token: int | None
    refusal: str | None


def kv_rows(head_dim: int | None, kv_heads: int | None, layers: int | None) -> tuple[KVRow, ...]:
    """The full cache in bfloat16 and the schemes that are worth a look; none where the config states no sizes."""
    if not head_dim or not kv_heads or not layers:
        return ()
    heads = kv_heads * layers
    rows = [KVRow(scheme="full", bytes_per_token=heads * full_bytes_per_token(head_dim), refusal=None)]
    for text in SHOWN:
        scheme = parse_scheme(text)
        assert scheme is not None, "not the full cache"
        reason = scheme.refusal(head_dim)
        size = None if reason is not None else heads * scheme.bytes_per_token(head_dim)
        rows.append(KVRow(scheme=text, bytes_per_token=size, refusal=reason))
    return tuple(rows)
