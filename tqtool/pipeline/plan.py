"""What a job will do, as data: one row per output tensor, totals, estimates."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqtool.solve.quantizer import Quantizer, RowQuantizer, StoredTensor, scratch_bytes
from tqtool.solve.rtn import FloatStore
from tqtool.source.checkpoint import Checkpoint
from tqtool.transform.folds import FoldChannels, OnRows
from tqtool.transform.plan import OutputTensor

_LAYER = re.compile(r"\.\d+\.")
_OF_ONE_LAYER = re.compile(r"(?<=lane )\d+|(?<=(?:channels|outliers)\[)[0-9a-f]+")

BASE_MEMORY_BYTES = 80 << 20
"""Interpreter, numpy and MLX: measured 75 MB, see tests/e2e/test_convert_limits.py."""


CHECK_BASE_BYTES = 290 << 20
"""mlx-lm with transformers in a process of its own, no weight read: measured 273 MB."""
CHECK_TRELLIS_BYTES = 64
"""Scratch per weight of stock mlx-lm when the shipped model file decodes a trellis layer; measured 58."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One output tensor with its quantizer and what will be stored for it.

    A stack of experts has the work of each part in ``parts``; ``quantizer`` is then what all of them are stored as.
    """

    output: OutputTensor
    quantizer: Quantizer
    stored: tuple[StoredTensor, ...]
    parts: tuple[Work, ...] = ()

    @property
    def pieces(self) -> tuple[Work, ...]:
        """What is folded and quantized on its own: the parts of a stack, or the work itself."""
        return self.parts or (self,)

    @property
    def label(self) -> str:
        """The quantizer's label; of a stack whose parts differ, each label with its count."""
        counts = Counter(piece.quantizer.label for piece in self.pieces)
        if len(counts) == 1:
            return next(iter(counts))
        return ", ".join(f"{count} × {label}" for label, count in counts.most_common())

    @property
    def parameters(self) -> int:
        """Elements before quantization."""
        return math.prod(self.output.shape)

    @property
    def stored_bytes(self) -> int:
        """Bytes of everything stored for it."""
        return sum(tensor.nbytes for tensor in self.stored)

    @property
    def code_bytes(self) -> int:
        """Bytes without scales and biases."""
        return sum(tensor.nbytes for tensor in self.stored if tensor.name == self.output.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One output tensor of the job."""

    tensor: str
    source: str
    module: str | None
    role: str
    quantizer: str
    shape: tuple[int, ...]
    folds: tuple[str, ...]
    parameters: int
    stored_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTotals:
    """Sums over the rows. Sizes in bytes; rates in bits per weight.

    ``bits_per_weight`` divides all stored tensor bytes by the artifact's parameters, as mlx-lm does;
    ``bits_per_source_weight`` by the source's, so that an untied head is not counted as free parameters.
    ``code_bits_per_weight`` leaves scales and biases out. ``check_memory_bytes`` is what the forward check of the
    written artifact takes in a process of its own, while this one still holds what it has.
    """

    tensors: int
    parameters: int
    source_parameters: int
    source_bytes: int
    tensor_bytes: int
    shards: int
    bits_per_weight: float
    bits_per_source_weight: float
    code_bits_per_weight: float
    peak_memory_bytes: int
    check_memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The resolved plan of a job.

    ``notes`` are facts about the artifact and kept with it; ``warnings`` are about this run; ``hints`` are advice.
    ``companion`` is the plan of the artifact inside it: in its disk and memory, in no other total.
    """

    out: str
    transform: str
    rotation_seed: int | None
    rows: tuple[JobRow, ...]
    totals: JobTotals
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    hints: tuple[str, ...]
    companion: JobPlan | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)


def row_of(work: Work, notes: tuple[str, ...]) -> JobRow:
    """The printable row of one output."""
    output = work.output
    return JobRow(
        tensor=output.name,
        source=output.source_text,
        module=output.module,
        role=output.role.value,
        quantizer=work.label,
        shape=output.shape,
        folds=tuple(str(op) for op in output.folds),
        parameters=work.parameters,
        stored_bytes=work.stored_bytes,
        notes=notes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows that differ only in their layer number."""

    pattern: str
    count: int
    shape: str
    quantizer: str
    stored_bytes: int
    remark: str


def product_text(folds: Sequence[str]) -> str:
    """Folds as one product: ``("· diag(g)", "· R[…]")`` → ``W · diag(g) · R[…]``; empty without any."""
    left = [fold for fold in folds if fold.endswith("·")]
    right = [fold for fold in folds if fold.startswith("·")]
    rest = [fold for fold in folds if fold not in left and fold not in right]
    product = [" ".join((*reversed(left), "W", *right))] if left or right else []
    return "; ".join(product + rest)


def grouped_rows(rows: Sequence[JobRow]) -> tuple[RowGroup, ...]:
    """Fold layers together: what a person can read of a plan."""
    groups: dict[tuple[str, str, tuple[int, ...], str], list[JobRow]] = {}
    for row in rows:
        pattern = _LAYER.sub(".*.", row.module or row.tensor)
        folds = product_text(tuple(_LAYER.sub(".*.", fold) for fold in row.folds))
        remark = "; ".join((*row.notes, folds)) if folds else "; ".join(row.notes)
        groups.setdefault((pattern, row.quantizer, row.shape, _OF_ONE_LAYER.sub("n", remark)), []).append(row)
    return tuple(
        RowGroup(
            pattern=pattern,
            count=len(members),
            shape="×".join(map(str, shape)),
            quantizer=quantizer,
            stored_bytes=sum(row.stored_bytes for row in members),
            remark=remark,
        )
        for (pattern, quantizer, shape, remark), members in groups.items()
    )


def totals_of(
    checkpoint: Checkpoint,
    works: Sequence[Work],
    *,
    n_shards: int,
    other_bytes: int,
    apart: Collection[str] = (),
) -> JobTotals:
    """Sums and estimates; ``other_bytes`` are the files that are not shards, ``apart`` source tensors of no shard."""
    parameters = sum(work.parameters for work in works)
    source_parameters = sum(math.prod(ref.shape) for name, ref in checkpoint.tensors.items() if name not in apart)
    tensor_bytes = sum(work.stored_bytes for work in works)
    code_bytes = sum(work.code_bytes for work in works)
    return JobTotals(
        tensors=sum(len(work.stored) for work in works),
        parameters=parameters,
        source_parameters=source_parameters,
        source_bytes=sum(ref.nbytes for ref in checkpoint.tensors.values()),
        tensor_bytes=tensor_bytes,
        shards=n_shards,
        bits_per_weight=8 * tensor_bytes / max(1, parameters),
        bits_per_source_weight=8 * tensor_bytes / max(1, source_parameters),
        code_bits_per_weight=8 * code_bytes / max(1, parameters),
        peak_memory_bytes=peak_memory_bytes(checkpoint, works),
        check_memory_bytes=check_memory_bytes(works),
        disk_bytes=tensor_bytes + other_bytes,
    )


def peak_memory_bytes(checkpoint: Checkpoint, works: Sequence[Work]) -> int:
    """Estimate: the process, the largest scratch (MLX and malloc keep it between tensors), the largest tensor.

    Of a stack, whatever one part needs, and the stack itself.
    """
    pieces = [(piece, work.stored_bytes if work.parts else 0) for work in works for piece in work.pieces]
    scratch = max((scratch_bytes(piece.quantizer) for piece, _ in pieces), default=0)
    live = max((_live_bytes(checkpoint, piece) + stack for piece, stack in pieces), default=0)
    return BASE_MEMORY_BYTES + scratch + live


def _live_bytes(checkpoint: Checkpoint, work: Work) -> int:
    """Bytes alive at once for one tensor: first source and float32 copy, then float32 and result."""
    source = source_bytes(checkpoint, work.output)
    if not work.output.ops and isinstance(work.quantizer, RowQuantizer):
        # A cast reads its tensor at once; packing reads rows, and what they need is its scratch.
        return work.stored_bytes + (source if isinstance(work.quantizer, FloatStore) else 0)
    folds = [op.fold if isinstance(op, OnRows) else op for op in work.output.ops]
    is_copied = any(isinstance(fold, FoldChannels) for fold in folds)
    return 4 * work.parameters + max(source + is_copied * 4 * work.parameters, work.stored_bytes)


def source_bytes(checkpoint: Checkpoint, output: OutputTensor) -> int:
    """Bytes that are read for one piece: its source, or the rows it takes of it."""
    ref = checkpoint.tensors[output.source]
    return ref.nbytes if output.rows is None else math.prod(output.shape) * ref.dtype.itemsize


def check_memory_bytes(works: Sequence[Work]) -> int:
    """Estimate of the forward check: mlx-lm, what lies outside the layers, and the largest layer.

    Layers are let go one by one (``tqtool.artifact.reload``); an embedding or a head stays.
    """
    layers: Counter[str] = Counter()
    for work in works:
        match = _LAYER.search(work.output.name)
        layers[match.group() if match else ""] += work.stored_bytes
    outside = layers.pop("", 0)
    pieces = (piece for work in works if work.quantizer.config_entry() is None for piece in work.pieces)
    coded = max((piece.parameters for piece in pieces), default=0)  # experts are decoded one at a time
    return CHECK_BASE_BYTES + outside + max(layers.values(), default=0) + CHECK_TRELLIS_BYTES * coded
