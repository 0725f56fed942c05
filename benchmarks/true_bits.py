"""Bits per weight from the bytes on disk: one count for everybody's artifacts.

``linear``: everything stored for the linear modules of the blocks (codes, scales, offsets; not their float biases,
which no arm quantizes) over the weights that the source has there. ``total``: the weight files, headers included, over
all weights of the source, so that an untied head or a float32 scale is no free parameter.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tqtool.artifact.reader import read_manifest
from tqtool.formats.manifest import MANIFEST_NAME
from tqtool.formats.safetensors import TensorInfo, read_header

BLOCK = re.compile(r"(^|\.)layers\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What ``rates`` counts."""

    linear: float
    total: float
    weight_bytes: int


def rates(folder: Path, source: Path) -> Rates:
    """Rates of the artifact in ``folder``, made from the float model in ``source``.

    Raises:
        ValueError: no weight files, no linear module in the blocks, or a manifest that lists other bytes.
    """
    stored, original = _tensors(folder), _tensors(source)
    linear_weights = sum(math.prod(tensor.shape) for tensor in _linear(original))
    if not linear_weights:
        raise ValueError(f"{source}: no linear module in its blocks")
    weights = sum(math.prod(tensor.shape) for tensor in original)
    weight_bytes = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    if (folder / MANIFEST_NAME).exists():
        listed = sum(record.size_bytes for record in read_manifest(folder).stored().values())
        if listed != sum(tensor.size_bytes for tensor in stored):
            raise ValueError(f"{folder}: its manifest lists {listed} bytes of tensors, the files hold others")
    linear_bytes = sum(tensor.size_bytes for tensor in _linear(stored))
    return Rates(linear=8 * linear_bytes / linear_weights, total=8 * weight_bytes / weights, weight_bytes=weight_bytes)


def _tensors(folder: Path) -> list[TensorInfo]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no weight files")
    return [tensor for file in files for tensor in read_header(file).tensors.values()]


def _linear(tensors: list[TensorInfo]) -> list[TensorInfo]:
    """All tensors but ``bias`` of the modules in the blocks whose weight has at least two dimensions."""
    modules: dict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in tensors:
        if BLOCK.search(tensor.name):
            modules[tensor.name.rpartition(".")[0]].append(tensor)
    return [
        tensor
        for module, group in modules.items()
        if any(tensor.name == f"{module}.weight" and len(tensor.shape) >= 2 for tensor in group)
        for tensor in group
        if tensor.name != f"{module}.bias"
    ]
