"""Artifacts of small planned tensors, written by ``ArtifactWriter``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tqtool.artifact.writer import ArtifactWriter
from tqtool.formats.dtypes import DType
from tqtool.solve.quantizer import StoredTensor


def planned(*sizes: int) -> list[StoredTensor]:
    """Float32 vectors ``t0``, ``t1``, … of these sizes."""
    return [StoredTensor(name=f"t{i}", dtype=DType.F32, shape=(size,)) for i, size in enumerate(sizes)]


def arrays(tensors: list[StoredTensor]) -> list[np.ndarray]:
    """A value for each of ``planned``."""
    return [np.arange(tensor.shape[0], dtype=np.float32) + index for index, tensor in enumerate(tensors)]


def write_all(out: Path, tensors: list[StoredTensor], **options: object) -> ArtifactWriter:
    """Write and commit ``arrays(tensors)``; the writer, done."""
    with ArtifactWriter(out, tensors, **options) as writer:
        for tensor, array in zip(tensors, arrays(tensors), strict=True):
            writer.write(tensor.name, array)
        writer.commit()
    return writer


def only_entry(folder: Path) -> list[str]:
    """Names in ``folder``, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())
