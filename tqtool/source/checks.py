"""What makes a well-formed checkpoint unusable: already quantized, unknown, without tokenizer, not finite."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import NumericalError, SourceError
from tqtool.formats.dtypes import DType, dtype_of
from tqtool.source.config import declared_quantization

if TYPE_CHECKING:
    from tqtool.source.checkpoint import Checkpoint

Progress = Callable[[float, str], None]

# Endings that only packed weights have: MLX, GPTQ/AWQ, bitsandbytes, compressed-tensors, fp8 in that order.
QUANTIZED_SUFFIXES: Final = (
    ".scales",
    ".qweight",
    ".qzeros",
    ".g_idx",
    ".absmax",
    ".SCB",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_zero_point",
)
TOKENIZER_NAMES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_DAMAGED: Final = "the source weights are damaged; take them from another download"
_FINITE_CHUNK: Final = 1 << 20  # elements looked at together: a few MB of scratch, whatever the tensor
# Bits of the exponent; all of them set means inf or NaN.
_EXPONENT: Final[dict[DType, tuple[type[np.unsignedinteger[Any]], int]]] = {
    DType.BF16: (np.uint16, 0x7F80),
    DType.F16: (np.uint16, 0x7C00),
    DType.F32: (np.uint32, 0x7F800000),
    DType.F64: (np.uint64, 0x7FF0000000000000),
}

PARSED_BYTES: Final = 4 << 20
"""JSON files up to this size are parsed whole."""


def refuse_quantized(folder: Path, config: Mapping[str, Any], dtypes: Mapping[str, DType]) -> None:
    """Raise SourceError if the config or the tensors say that the weights are already quantized."""
    evidence = quantization_evidence(folder, config, dtypes)
    if evidence is not None:
        raise SourceError(
            f"{folder}: already quantized: {evidence}; expected bf16, f16, f32 or f64 weights",
            hint="start from the full-precision model; a second rounding loses quality silently",
        )


def quantization_evidence(folder: Path, config: Mapping[str, Any], dtypes: Mapping[str, DType]) -> str | None:
    """The first sign that a checkpoint is quantized, as a phrase, or None."""
    declared = declared_quantization(config)
    if declared is not None:
        return f"config.json has {declared}"
    if (folder / "hf_quant_config.json").exists():
        return "hf_quant_config.json is present"
    for name, dtype in dtypes.items():
        if name.endswith(QUANTIZED_SUFFIXES):
            return f"tensor {name!r}"
        if dtype.is_float8 or (name.endswith(".weight") and not dtype.is_float):
            return f"tensor {name!r} is {dtype}"
    return None


def tokenizer_warnings(folder: Path, files: Iterable[Path]) -> tuple[str, ...]:
    """One warning if none of the files a tokenizer can be loaded from is present."""
    present = {path.name for path in files}
    if present.isdisjoint(TOKENIZER_NAMES) and not any(name.endswith(".tiktoken") for name in present):
        return (f"{folder}: no tokenizer (none of {', '.join(TOKENIZER_NAMES)})",)
    return ()


def require_json(files: Iterable[Path]) -> None:
    """Raise SourceError when a JSON file that the artifact would carry along is none.

    Files beyond ``PARSED_BYTES`` (tokenizers) are not parsed, which would take ten times their size in memory: only
    their first and last characters are looked at, so that a truncated one is seen.
    """
    for path in files:
        if path.suffix != ".json":
            continue
        size = path.stat().st_size
        try:
            with path.open("rb") as file:
                if size <= PARSED_BYTES:
                    json.load(file)
                    continue
                head = file.read(64).lstrip()[:1]
                file.seek(-64, os.SEEK_END)
                if (head + file.read().rstrip()[-1:]) not in (b"{}", b"[]"):
                    raise ValueError("truncated")
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"{path}: expected JSON, found something else ({error})", hint="download the file again, or remove it"
            ) from error


def require_finite(name: str, array: NDArray[Any], *, hint: str = _DAMAGED) -> None:
    """Raise NumericalError if ``array`` holds an inf or a NaN; scratch is a few MB whatever its size."""
    if array.dtype.kind in "iub":
        return
    count, first = _count_non_finite(array.reshape(-1))
    if count:
        raise _not_finite(name, array.shape, count, first, hint=hint)


def check_finite(checkpoint: Checkpoint, progress: Progress | None = None) -> None:
    """Read every tensor once, a few MB at a time; NumericalError on the first one that is not finite.

    ``progress(bytes, tensor name)`` is called after each piece.
    """
    for ref in checkpoint.tensors.values():
        if not ref.dtype.is_float:
            continue
        rows = ref.shape[0] if ref.shape else 1
        row_elements = max(1, ref.nbytes // ref.dtype.itemsize // max(rows, 1))
        step = max(1, _FINITE_CHUNK // row_elements)
        count, first = 0, -1
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            piece = ref.read_rows(start, stop) if ref.shape else ref.read()
            bad, where = _count_non_finite(piece.reshape(-1))
            if bad and first < 0:
                first = start * row_elements + where
            count += bad
            if progress is not None:
                progress(piece.nbytes, ref.name)
        if count:
            raise _not_finite(f"{ref.path.name}: {ref.name}", ref.shape, count, first)


def _count_non_finite(flat: NDArray[Any]) -> tuple[int, int]:
    """How many elements are inf or NaN, and the flat index of the first (-1 if none)."""
    unsigned, mask = _EXPONENT[dtype_of(flat)]
    bits = flat.view(unsigned)
    count, first = 0, -1
    for start in range(0, bits.size, _FINITE_CHUNK):
        bad = (bits[start : start + _FINITE_CHUNK] & unsigned(mask)) == unsigned(mask)
        if bad.any():
            if first < 0:
                first = start + int(bad.argmax())
            count += int(bad.sum())
    return count, first


def _not_finite(name: str, shape: Sequence[int], count: int, first: int, *, hint: str = _DAMAGED) -> NumericalError:
    index = [int(i) for i in np.unravel_index(first, tuple(shape))] if shape else []
    return NumericalError(
        f"{name}: {count:,} of {math.prod(shape):,} values are inf or NaN, the first at {index}",
        hint=hint,
    )
