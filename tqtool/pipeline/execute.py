"""Carry out a planned job: read, check, fold, quantize, write, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tqtool.artifact.card import CARD_NAME
from tqtool.artifact.config import encode_config
from tqtool.artifact.stop_tokens import generation_config_bytes
from tqtool.artifact.writer import ArtifactWriter, FileRecord
from tqtool.errors import ArtifactError, NumericalError
from tqtool.formats.dtypes import dtype_of
from tqtool.formats.manifest import MANIFEST_NAME, Manifest, TensorRecord, encode, with_files
from tqtool.pipeline.hashing import BackgroundHash
from tqtool.pipeline.plan import Work
from tqtool.pipeline.provenance import (
    OPTIQ_NAME,
    Made,
    build_manifest,
    card,
    optiq_metadata,
    tensor_record,
    transform_records,
)
from tqtool.pipeline.reuse import Shelf, tensor_key
from tqtool.solve.quantizer import QuantResult, ReadRows, RowQuantizer
from tqtool.solve.rtn import FloatStore
from tqtool.source.checkpoint import Checkpoint
from tqtool.source.checks import require_finite
from tqtool.transform.apply import apply_folds
from tqtool.transform.outputs import OutputTensor

if TYPE_CHECKING:
    from tqtool.pipeline.job import Job

Progress = Callable[[float, str], None]
Check = Callable[[Path], None]


class SourceReader:
    """Reads source tensors, refuses non-finite ones, and remembers the hash of each."""

    def __init__(self, checkpoint: Checkpoint, executor: Executor) -> None:
        self._checkpoint = checkpoint
        self._executor = executor
        self._hashes: dict[str, BackgroundHash] = {}

    def sha256(self, name: str) -> str:
        """Hash of the source tensor ``name``, which was read whole."""
        return self._hashes[name].hexdigest()

    def all_sha256(self) -> dict[str, str]:
        """Hashes of all tensors read."""
        return {name: self.sha256(name) for name in self._hashes}

    def has_read(self, name: str) -> bool:
        """True when ``name`` was read, so that it was checked and has a hash."""
        return name in self._hashes

    def read(self, name: str) -> NDArray[Any]:
        """The tensor ``name`` in its stored dtype."""
        array = self._checkpoint.tensors[name].read()
        if name not in self._hashes:
            require_finite(name, array)
            self._hashes[name] = BackgroundHash(self._executor)
            self._hashes[name].update(_bytes(array))
        return array

    def reads(self, output: OutputTensor) -> Callable[[str], NDArray[Any]]:
        """``read``, but for the source that ``output`` takes some rows of: of that these rows alone.

        Such a source is read whole once, for its hash and to see that it is finite.
        """
        if output.rows is None:
            return self.read
        ref, rows = self._checkpoint.tensors[output.source], output.rows
        if not self.has_read(output.source):
            outer = self.rows(output.source)
            for index in range(ref.shape[0]):
                outer(index, index + 1)
        return lambda name: ref.read_flat_rows(*rows) if name == output.source else self.read(name)

    def rows(self, name: str) -> ReadRows:
        """A function that reads the rows of ``name`` in order, hashing as they pass."""
        ref = self._checkpoint.tensors[name]
        if len(ref.shape) < 2:
            whole = self.read(name)
            return lambda start, stop: whole
        digest = self._hashes[name] = BackgroundHash(self._executor)
        at = 0

        def read_rows(start: int, stop: int) -> NDArray[Any]:
            nonlocal at
            assert start == at, "rows are read once each, in order"
            chunk = ref.read_rows(start, stop)
            try:
                require_finite(name, chunk)
            except NumericalError:
                require_finite(name, ref.read())  # says where in the whole tensor
                raise
            digest.update(_bytes(chunk))
            at = stop
            return chunk

        return read_rows


def execute(job: Job, progress: Progress, check: Check | None) -> tuple[Manifest, tuple[str, ...]]:
    """Write the artifact of ``job``; returns its manifest and remarks about the run. See ``Job.run``."""
    manifest, notes, _ = _write(job, progress, check)
    return manifest, notes


def _write(
    job: Job, progress: Progress, check: Check | None
) -> tuple[Manifest, tuple[str, ...], Mapping[str, FileRecord]]:
    """The same, and every file that was written."""
    planned = [stored for work in job.works for stored in work.stored]
    parameters = job.plan.totals.parameters
    records: list[TensorRecord] = []
    shelf = Shelf(job.extras.reuse, job.extras.journal)
    with (
        ThreadPoolExecutor(max_workers=1) as hasher,
        ArtifactWriter(job.out, planned, total_parameters=parameters, overwrite=job.extras.overwrite) as writer,
    ):
        reader = SourceReader(job.checkpoint, hasher)
        maker = Maker(reader, shelf, job.extras.notes, progress)
        for work in job.works:
            tensors, made = maker.make_stack(work) if work.parts else maker.make(work)
            for name, array in tensors.items():
                writer.write(name, array)
            del tensors  # not held while the next tensor is read
            records.append(tensor_record(work, made, tuple(job.extras.notes.get(work.output.name, ())), writer))
        manifest = _write_companions(job, writer, reader, records)
        if check is not None:
            check(writer.folder)
        writer.commit()
    shelf.clear()
    reused = (f"{shelf.taken} tensors reused",) if job.extras.reuse or shelf.taken else ()
    return manifest, (*writer.notes, *reused), writer.files


class Maker:
    """Makes the tensors of one job, stacks part by part."""

    def __init__(
        self, reader: SourceReader, shelf: Shelf, notes: Mapping[str, tuple[str, ...]], progress: Progress
    ) -> None:
        self._reader, self._shelf, self._notes, self._progress = reader, shelf, notes, progress

    def make(self, work: Work) -> tuple[Mapping[str, NDArray[Any]], list[Made]]:
        """What is stored for one piece, and how it was made."""
        output, known_notes = work.output, self._notes.get(work.output.name, ())
        result, key = quantize(work, self._reader, self._shelf, known_notes)
        self._progress(work.parameters, output.name)
        made = Made(
            stats=result.stats,
            notes=(*known_notes, *result.notes),
            source_sha256=self._reader.sha256(output.source),
            key=key,
        )
        return result.tensors, [made]

    def make_stack(self, work: Work) -> tuple[Mapping[str, NDArray[Any]], list[Made]]:
        """What is stored for a stack: every part in its place."""
        stacks = {stored.name: np.empty(stored.shape, stored.dtype.numpy) for stored in work.stored}
        made: list[Made] = []
        for index, part in enumerate(work.parts):
            tensors, one = self.make(part)
            for stack, array in zip(stacks.values(), tensors.values(), strict=True):
                stack[index] = array
            made += one
        return stacks, made


_TOO_LARGE = "the source's values are finite, but too large to be folded in float32; without a rotation few are folded"


def quantize(
    work: Work, reader: SourceReader, shelf: Shelf, known_notes: tuple[str, ...]
) -> tuple[QuantResult, str | None]:
    """Fold and quantize one tensor, or take it from the shelf; with the key it can be found by later.

    Raises:
        ArtifactError: the quantizer breaks its promise, or the tensor on the shelf is damaged.
        NumericalError: what is folded, or stored dense, is not finite, though its source is.
    """
    output, key = work.output, None
    if isinstance(work.quantizer, RowQuantizer) and _is_whole(output):
        result = work.quantizer.run_rows(output.name, output.shape, reader.rows(output.source))
    else:
        with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is named just below
            weight = apply_folds(output, reader.reads(output))
        if output.ops:
            require_finite(f"{output.name}, folded", weight, hint=_TOO_LARGE)
        if not reader.has_read(output.source):
            reader.read(output.source)  # a fill reads nothing, but provenance and finiteness cover every source
        key = tensor_key(work, reader.sha256)
        found = shelf.take(key, work, known_notes)
        result = work.quantizer.run(output.name, weight) if found is None else found
        if found is None:
            shelf.keep(key, work, result)
        tick = getattr(work.quantizer, "tick", None)
        if found is not None and tick is not None:
            tick(work.parameters)  # the encoder would have said so
    returned = [(name, dtype_of(array), tuple(array.shape)) for name, array in result.tensors.items()]
    promised = [(stored.name, stored.dtype, stored.shape) for stored in work.stored]
    if isinstance(work.quantizer, FloatStore):
        for name, array in result.tensors.items():
            require_finite(
                f"{name} as {work.label}", array, hint="the source's values are too large for it: --dtype f32"
            )
    if returned != promised:
        raise ArtifactError(f"{output.name}: {work.quantizer.label} promised {promised}, returned {returned}")
    return result, key


def _is_whole(output: OutputTensor) -> bool:
    """True for a source tensor that is stored as it is, so that it can be packed while it is read."""
    return not output.ops and len(output.shape) <= 2 and output.rows is None


def _write_companions(job: Job, writer: ArtifactWriter, reader: SourceReader, records: list[TensorRecord]) -> Manifest:
    """Everything that is not a shard, the manifest last."""
    transforms = transform_records(job.checkpoint, job.transform)
    writer.add_index()
    writer.add_bytes("config.json", encode_config(job.config))
    writer.add_bytes(OPTIQ_NAME, optiq_metadata(transforms, job))
    generation = generation_config_bytes(job.checkpoint.files, job.stop_tokens)
    if generation is not None:
        writer.add_bytes("generation_config.json", generation)
    for relpath, content in sorted(job.extras.files.items()):
        if isinstance(content, bytes):
            writer.add_bytes(relpath, content)
        else:
            writer.copy_file(relpath, content)
    for path in job.checkpoint.files:
        if path.name not in writer.files and path.name != CARD_NAME:
            writer.copy_file(path.name, path)
    for relpath, names in job.extras.sidecars.items():
        writer.add_sidecar(relpath, names)
    if job.extras.companion is not None:
        folder = job.extras.companion.out.name
        inside = replace(job.extras.companion, out=writer.folder / folder)
        writer.adopt(folder, _write(inside, _silent, None)[2])
    manifest = build_manifest(
        job, records=records, transforms=transforms, source_sha256=reader.all_sha256(), writer=writer
    )
    readme = card(job, manifest)
    writer.add_bytes(CARD_NAME, readme)
    manifest = with_files(manifest, {CARD_NAME: readme})
    writer.add_bytes(MANIFEST_NAME, encode(manifest))
    return manifest


def _silent(amount: float, what: str) -> None:
    """Progress of a companion: a thousandth of its trunk's."""
    del amount, what


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
