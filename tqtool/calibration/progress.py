"""What an interrupted calibration leaves for ``--resume``: finished layers, and the hidden states behind the last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqtool.artifact.output import whole_file
from tqtool.errors import ArtifactError
from tqtool.formats.dtypes import DType
from tqtool.formats.hessians import DroppedSequence, InputRecord, RoutingRecord, hash_file
from tqtool.formats.safetensors import build_header, read_header

PROGRESS_NAME: Final = "progress.json"

Array = NDArray[np.float32]


@dataclass(slots=True)
class State:
    """What ``progress.json`` holds: finished layers, their records, the hash of every file.

    ``dropped`` says of each sequence that goes no further in which layer its hidden state stopped being finite; its
    place in the hidden states is kept, with zeros.
    """

    key: str
    layers_done: int = 0
    inputs: list[InputRecord] = field(default_factory=list)
    routing: list[RoutingRecord] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)

    def kept(self, sequences: int) -> list[int]:
        """Numbers of the sequences that still go on."""
        return [at for at in range(sequences) if at not in self.dropped]

    def dropped_list(self) -> list[DroppedSequence]:
        """``dropped`` as the format has it."""
        return [DroppedSequence(sequence=at, layer=layer) for at, layer in sorted(self.dropped.items())]


def state_file(layers: int) -> str:
    """Name of the file with the hidden states behind ``layers`` layers."""
    return f"state-{layers:05d}.safetensors"


def write_tensors(path: Path, shapes: dict[str, tuple[int, ...]], arrays: Iterable[Array]) -> None:
    """A safetensors file of float32, whole or not at all; ``arrays`` in the order of ``shapes``, one at a time."""
    header, _ = build_header([(name, DType.F32, shape) for name, shape in shapes.items()], {"format": "tqtool"})
    with whole_file(path) as (file, _):
        file.write(header)
        for array, (name, shape) in zip(arrays, shapes.items(), strict=True):
            assert array.shape == shape, f"{name}: {array.shape} in place of {shape}"
            file.write(np.ascontiguousarray(array, "<f4").data)


def load_hidden(out: Path, state: State, sequences: Sequence[NDArray[np.uint32]]) -> list[Array]:
    """Hidden states ``[tokens, hidden]`` of each of ``sequences``; ArtifactError if any file changed."""
    name = state_file(state.layers_done)
    for file, digest in state.files.items():
        if hash_file(out / file) != digest:
            raise ArtifactError(f"{out / file}: damaged since it was written", hint="remove OUT and start again")
    tensor = read_header(out / name).tensors["hidden"]
    flat = np.fromfile(out / name, "<f4", offset=tensor.begin).reshape(tensor.shape)
    ends = np.cumsum([sequence.size for sequence in sequences])
    return [np.ascontiguousarray(part) for part in np.split(flat, ends[:-1])]


def write_state(out: Path, state: State) -> None:
    """``progress.json``, sealed."""
    body: dict[str, Any] = {
        "key": state.key,
        "layers_done": state.layers_done,
        "inputs": [record.model_dump(mode="json") for record in state.inputs],
        "routing": [record.model_dump(mode="json") for record in state.routing],
        "files": state.files,
        "dropped": [record.model_dump(mode="json") for record in state.dropped_list()],
    }
    sealed = {**body, "sha256": hashlib.sha256(json.dumps(body).encode()).hexdigest()}
    with whole_file(out / PROGRESS_NAME) as (file, _):
        file.write(json.dumps(sealed, indent=1).encode())


def read_state(out: Path) -> State:
    """What ``write_state`` wrote; ArtifactError if it is not."""
    try:
        body = json.loads((out / PROGRESS_NAME).read_bytes())
        seal = body.pop("sha256")
        if hashlib.sha256(json.dumps(body).encode()).hexdigest() != seal:
            raise ValueError("it was edited or damaged")
        dropped = [DroppedSequence.model_validate(record) for record in body["dropped"]]
        return State(
            key=body["key"],
            layers_done=body["layers_done"],
            inputs=[InputRecord.model_validate(record) for record in body["inputs"]],
            routing=[RoutingRecord.model_validate(record) for record in body["routing"]],
            files=body["files"],
            dropped={record.sequence: record.layer for record in dropped},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(
            f"{out / PROGRESS_NAME}: cannot be read ({error})", hint="remove OUT and start again"
        ) from error
