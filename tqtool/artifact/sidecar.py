"""``optiq/optiq_vision.safetensors``: the vision tower once more, where OptiQ looks for it.

An ordinary safetensors file. Stock loaders take ``model*.safetensors`` of the folder itself and never see it. Its
tensors are those of the shards, byte for byte, under the same names; ``config.json: optiq_vision`` points to it.
Prose: docs/formats/vision.md.
"""

from __future__ import annotations

import hashlib

from tqtool.artifact.reader import Artifact
from tqtool.formats.safetensors import read_header

VISION_NAME = "optiq/optiq_vision.safetensors"
TOWER = "vision_tower."
_BLOCK = 1 << 20


def sidecar_problems(artifact: Artifact) -> tuple[int, list[str]]:
    """Number of its tensors, and where it differs from the shards' tower, one line each."""
    header = read_header(artifact.path / VISION_NAME)
    expected = {name: record for name, record in artifact.manifest.stored().items() if name.startswith(TOWER)}
    problems = [f"{VISION_NAME}: lacks {name}" for name in expected if name not in header.tensors]
    problems += [f"{VISION_NAME}: holds {name}, which no shard does" for name in header.tensors if name not in expected]
    with header.path.open("rb") as file:
        for name, info in header.tensors.items():
            record = expected.get(name)
            if record is None:
                continue
            if (info.dtype.value, list(info.shape)) != (record.dtype, record.shape):
                problems.append(f"{VISION_NAME}: {name} is {info.dtype.value} {list(info.shape)}, not as in the shards")
                continue
            digest, left = hashlib.sha256(), info.end - info.begin
            file.seek(info.begin)
            while block := file.read(min(left, _BLOCK)):
                digest.update(block)
                left -= len(block)
            if digest.hexdigest() != record.sha256:
                problems.append(f"{VISION_NAME}: {name} has other values than in the shards")
    stated = artifact.config.get("optiq_vision")
    if not isinstance(stated, dict) or stated.get("sidecar") != VISION_NAME or stated.get("n_tensors") != len(expected):
        problems.append(f"config.json: optiq_vision: expected sidecar {VISION_NAME} of {len(expected)} tensors")
    return len(header.tensors), problems
