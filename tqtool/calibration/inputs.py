"""What the modules of one layer read, summed: dense inputs as they come, those of experts when the layer is done.

An expert reads some tokens of each sequence, and a layer may have hundreds of experts: a Hessian each, all at once,
would take gigabytes. The rows they share are kept instead, and the Hessians made from them one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tqtool.solve.hessian import HessianSum

MAX_SINKS = 4096
"""Sink rows kept whole for one input; more than that are no longer rare and are summed like the others."""

Array = NDArray[np.float32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRows:
    """What the experts of one block read of one sequence.

    Attributes:
        rows: ``[n, in]``.
        experts: ``[n, k]``, the experts that read each row.
        tokens: ``[n]``, the position in the sequence that each row is of.
    """

    rows: Array
    experts: NDArray[np.int32]
    tokens: NDArray[np.int32]


@dataclass(slots=True)
class Seen:
    """What one layer read of one sequence: input by first reader, rows of experts by stack."""

    dense: dict[str, Array] = field(default_factory=dict)
    routed: dict[str, RoutedRows] = field(default_factory=dict)


class InputSum:
    """Ordinary rows summed, sinks kept."""

    def __init__(self, width: int) -> None:
        self.moments = HessianSum(width)
        self.sinks: list[Array] = []

    def add(self, rows: Array, sinks: Mask) -> None:
        """Add the rows of one sequence; ``sinks`` says which of them are."""
        kept = rows[sinks & np.isfinite(rows).all(axis=1)][: MAX_SINKS - len(self.sinks)]
        self.moments.accumulate(rows[~sinks])
        if len(kept) < np.count_nonzero(sinks):
            rest = rows[sinks][len(kept) :]
            self.moments.accumulate(rest)
        self.sinks += list(kept)

    def matrix(self) -> NDArray[np.floating]:
        """Mean second moment of the ordinary rows, ``[in, in]``; zero where all rows are sinks."""
        if self.sinks and not self.moments.rows:
            return np.zeros((self.moments.width, self.moments.width), np.float32)
        return self.moments.finish().matrix

    def stacked(self) -> Array:
        """The sinks, ``[m, in]``."""
        return np.stack(self.sinks) if self.sinks else np.empty((0, self.moments.width), np.float32)


class ExpertInputs:
    """The rows that the experts of one stack read, of all sequences."""

    def __init__(self, experts: int) -> None:
        self._count = experts
        self._chunks: list[tuple[RoutedRows, Mask]] = []

    def add(self, routed: RoutedRows, sinks: Mask) -> None:
        """Keep the rows of one sequence; ``sinks`` ``[T]`` says which positions are."""
        self._chunks.append((routed, sinks[routed.tokens]))

    def tokens(self) -> list[int]:
        """How many rows each expert reads, sinks among them."""
        counts = np.zeros(self._count, np.int64)
        for routed, _ in self._chunks:
            counts += np.bincount(routed.experts.reshape(-1), minlength=self._count)
        return [int(count) for count in counts]

    @property
    def width(self) -> int:
        """Inputs of an expert."""
        return int(self._chunks[0][0].rows.shape[1])

    def sinks(self) -> list[int]:
        """How many sinks ``sums`` will keep for each expert."""
        counts = np.zeros(self._count, np.int64)
        for routed, sinks in self._chunks:
            kept = sinks & np.isfinite(routed.rows).all(axis=1)
            counts += np.bincount(routed.experts[kept].reshape(-1), minlength=self._count)
        return [min(MAX_SINKS, int(count)) for count in counts]

    def sums(self) -> Iterator[InputSum | None]:
        """The sum of each expert, in order; None for one that read nothing."""
        for expert, tokens in enumerate(self.tokens()):
            if not tokens:
                yield None
                continue
            total = InputSum(self.width)
            for routed, sinks in self._chunks:
                mine = (routed.experts == expert).any(axis=1)
                if mine.any():
                    total.add(routed.rows[mine], sinks[mine])
            yield total


@dataclass(slots=True)
class LayerInputs:
    """All inputs of one layer; ``experts`` says how many parts each stack has."""

    experts: dict[str, int]
    dense: dict[str, InputSum] = field(default_factory=dict)
    routed: dict[str, ExpertInputs] = field(default_factory=dict)

    def add(self, seen: Seen, sinks: Mask) -> None:
        """Add one sequence."""
        for key, rows in seen.dense.items():
            self.dense.setdefault(key, InputSum(rows.shape[1])).add(rows, sinks)
        for stack, routed in seen.routed.items():
            self.routed.setdefault(stack, ExpertInputs(self.experts[stack])).add(routed, sinks)
