"""Which KV cache a run uses: the text of ``--kv-quant``, what it means, and how many bytes a token costs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tqtool.errors import UserError

HEAD_DIMS = (64, 128, 256, 512)
"""Head dimensions that turbo schemes take: powers of two with sign vectors of their own."""
GROUP = 32
"""Elements along the head dimension that share a scale."""
KEY_BITS = (2, 4, 5, 8)
VALUE_BITS = (2, 3, 4, 5, 8)
AFFINE_GROUPS = (64, 32)
"""Group sizes of affine schemes; the first that divides the head dimension is used."""

Rule = Literal["exact", "vllm-metal"]
Kind = Literal["turbo", "affine"]

_TURBO = re.compile(r"turbo(?::k([1-9]\d*)v([1-9]\d*))?(:vllm-metal)?")
_AFFINE = re.compile(r"affine(4|8)")
_FULL = ("none", "full")
_HINT = (
    "turbo (k8v3), turbo:k<2|4|5|8>v<2|3|4|5|8>, affine8, affine4, or none; "
    "turbo:k8v3:vllm-metal has the tables and rules of that project"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScheme:
    """A quantized KV cache.

    Attributes:
        kind: ``turbo``: keys affine in groups of 32, values rotated and on Lloyd-Max levels (docs/formats/kv.md).
            ``affine``: mlx-lm's own QuantizedKVCache.
        k_bits: Of a key's element.
        v_bits: Of a value's element.
        rule: Of turbo schemes: ``exact`` tables, or those and the arithmetic of ``vllm-metal``.

    Raises:
        UserError: bits or a rule that the kind does not have.
    """

    kind: Kind
    k_bits: int
    v_bits: int
    rule: Rule = "exact"

    def __post_init__(self) -> None:
        is_turbo = self.k_bits in KEY_BITS and self.v_bits in VALUE_BITS and self.rule in ("exact", "vllm-metal")
        is_affine = self.k_bits == self.v_bits and self.k_bits in (4, 8) and self.rule == "exact"
        if not (is_turbo if self.kind == "turbo" else self.kind == "affine" and is_affine):
            raise UserError(
                f"KV scheme {self.kind} with {self.k_bits}-bit keys and {self.v_bits}-bit values, {self.rule}: unknown",
                hint=_HINT,
            )

    @property
    def name(self) -> str:
        """The text that ``parse_scheme`` reads; also what tells caches of different schemes apart."""
        if self.kind == "affine":
            return f"affine{self.k_bits}"
        return f"turbo:k{self.k_bits}v{self.v_bits}" + (":vllm-metal" if self.rule == "vllm-metal" else "")

    @property
    def is_batchable(self) -> bool:
        """Whether caches of several requests can be one batch: of no quantized scheme."""
        return False

    def refusal(self, head_dim: int) -> str | None:
        """Why layers of this head dimension cannot have such a cache, or None."""
        if self.kind == "turbo" and head_dim not in HEAD_DIMS:
            return f"head dimension {head_dim}: turbo takes {', '.join(map(str, HEAD_DIMS))}"
        if self.kind == "affine" and affine_group(head_dim) is None:
            return f"head dimension {head_dim}: affine takes multiples of {AFFINE_GROUPS[-1]}"
        return None

    def bytes_per_token(self, head_dim: int, *, float_bytes: int = 2) -> int:
        """Bytes that one token of one KV head takes, scales included.

        Args:
            head_dim: Of keys and values.
            float_bytes: Of the model's dtype, which is that of affine scales; turbo's are always float16.

        Raises:
            UserError: ``refusal`` has a reason.
        """
        reason = self.refusal(head_dim)
        if reason is not None:
            raise UserError(f"KV scheme {self.name}: {reason}")
        codes = head_dim * (self.k_bits + self.v_bits) // 8
        if self.kind == "turbo":
            return codes + head_dim // GROUP * 6  # scale and zero of keys, scale of values, float16 each
        group = affine_group(head_dim)
        assert group is not None, "no refusal"
        return codes + head_dim // group * 4 * float_bytes  # scale and bias, of keys and of values


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOptions:
    """Which cache a run uses.

    Attributes:
        scheme: None for the full cache.
        start: Tokens that are kept as floats until there are so many; then all of them are packed.

    Raises:
        UserError: ``start`` is negative, or given without a scheme.
    """

    scheme: KVScheme | None = None
    start: int = 0

    def __post_init__(self) -> None:
        if self.start < 0 or (self.start and self.scheme is None):
            raise UserError(f"--kv-start {self.start}: expected a number of tokens, and --kv-quant with it")

    @property
    def name(self) -> str | None:
        """For reports: the scheme, and from where on; None for the full cache."""
        if self.scheme is None:
            return None
        return self.scheme.name + (f" from {self.start}" if self.start else "")


def parse_options(text: str | None, start: int) -> KVOptions:
    """What ``--kv-quant`` and ``--kv-start`` say; UserError as ``parse_scheme`` and ``KVOptions``."""
    return KVOptions(scheme=parse_scheme(text), start=start)


FULL_CACHE = KVOptions()


def parse_scheme(text: str | None) -> KVScheme | None:
    """The scheme that ``text`` names; None, ``none`` and ``full`` are the full cache.

    Raises:
        UserError: no scheme is called so.
    """
    if text is None or text in _FULL:
        return None
    turbo, affine = _TURBO.fullmatch(text), _AFFINE.fullmatch(text)
    if turbo is not None:
        rule: Rule = "vllm-metal" if turbo[3] else "exact"
        return KVScheme(kind="turbo", k_bits=int(turbo[1] or 8), v_bits=int(turbo[2] or 3), rule=rule)
    if affine is not None:
        return KVScheme(kind="affine", k_bits=int(affine[1]), v_bits=int(affine[1]))
    raise UserError(f"--kv-quant {text}: no such KV scheme", hint=_HINT)


def affine_group(head_dim: int) -> int | None:
    """The group size of an affine cache, or None if none divides ``head_dim``."""
    return next((group for group in AFFINE_GROUPS if head_dim % group == 0), None)


def full_bytes_per_token(head_dim: int, value_dim: int | None = None, *, float_bytes: int = 2) -> int:
    """Bytes that one token of one KV head takes in the full cache."""
    return float_bytes * (head_dim + (head_dim if value_dim is None else value_dim))
