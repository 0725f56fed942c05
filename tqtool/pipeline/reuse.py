"""Encode once, mix later: tensors of earlier artifacts spliced into a new one when nothing that decides them differs.

What decides a stored tensor is its source, its folds with the norm gains they use, the quantizer's recipe (which names
the Hessian by its content) and the version of tqtool. The hash of all that is the row's ``key`` in the manifest. An
artifact made with reuse is byte for byte the one made without.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.artifact.reader import Artifact, open_artifact
from tqtool.errors import ArtifactError
from tqtool.formats.manifest import TensorRecord
from tqtool.pipeline.plan import Work
from tqtool.solve.quantizer import QuantResult, Reusable
from tqtool.transform.ops import ScaleInput, op_to_json

KEY_VERSION = 1


def tensor_key(work: Work, sha256_of: Callable[[str], str]) -> str | None:
    """Hash of all that decides what is stored for ``work``; None where making it anew is as cheap as copying.

    Args:
        work: The tensor and its quantizer.
        sha256_of: Hash of a source tensor's bytes.
    """
    if not isinstance(work.quantizer, Reusable):
        return None
    ops = work.output.ops
    facts = {
        "key_version": KEY_VERSION,
        "tqtool": importlib.metadata.version("tqtool"),
        "source": sha256_of(work.output.source),
        "shape": list(work.output.shape),
        "ops": [op_to_json(op) | _gain(op, sha256_of) for op in ops],
        "recipe": work.quantizer.recipe(work.output.name),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _gain(op: Any, sha256_of: Callable[[str], str]) -> dict[str, str]:
    """A gain counts by its values; the layer it stands in does not matter."""
    return {"gain": sha256_of(op.gain)} if isinstance(op, ScaleInput) else {}


class Shelf:
    """Tensors of finished artifacts by key."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Open ``folders``; ArtifactError if one is damaged or no artifact of tqtool."""
        self._places: dict[str, tuple[Artifact, TensorRecord]] = {}
        self.taken = 0
        for folder in folders:
            artifact = open_artifact(folder)
            for record in artifact.manifest.tensors:
                if record.key is not None:
                    self._places.setdefault(record.key, (artifact, record))

    def take(self, key: str | None, work: Work, known_notes: Sequence[str]) -> QuantResult | None:
        """What was stored under ``key``, named for ``work``; None if no artifact has it.

        Raises:
            ArtifactError: the bytes are not those of that artifact's manifest.
        """
        if key is None or key not in self._places:
            return None
        artifact, record = self._places[key]
        tensors: dict[str, NDArray[Any]] = {}
        for wanted, stored in zip(work.stored, record.stored, strict=True):
            array = artifact.read(stored.name)
            if hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest() != stored.sha256:
                raise ArtifactError(f"{artifact.path}: {stored.name}: its bytes are not those of its manifest")
            tensors[wanted.name] = array
        self.taken += 1
        notes = tuple(note for note in record.notes if note not in known_notes)
        return QuantResult(tensors=tensors, stats=record.stats, notes=notes)
