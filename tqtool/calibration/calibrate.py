"""``tqtool calibrate``: one pass over the model, layer by layer, summing what every linear layer reads.

Interrupted at any moment, it loses at most the layer in hand: after each layer its sums and the hidden states behind it
are on disk before ``progress.json`` says so.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tqtool.artifact.output import check_writable, whole_file
from tqtool.calibration.estimate import estimates
from tqtool.calibration.inputs import MAX_SINKS, ExpertInputs, InputSum, LayerInputs, Seen
from tqtool.calibration.progress import (
    PROGRESS_NAME,
    State,
    load_hidden,
    read_state,
    state_file,
    write_state,
    write_tensors,
)
from tqtool.calibration.rows import CalibrationRows, read_rows, require_disjoint
from tqtool.calibration.sinks import RATIO, sink_rows
from tqtool.errors import ArtifactError, NumericalError, UserError
from tqtool.evals.text import tokenizer_hash
from tqtool.formats.hessians import (
    INFO_NAME,
    TAIL_FILE,
    CalibrationInfo,
    InputRecord,
    RoutingRecord,
    encode,
    hash_file,
    pack_triangle,
)
from tqtool.formats.teacher import open_dump
from tqtool.pipeline.convert import plan_transform
from tqtool.pipeline.preflight import require_disk
from tqtool.runtime.blas import ensure_blas
from tqtool.runtime.load import load_tokenizer
from tqtool.source.checkpoint import Checkpoint, open_checkpoint
from tqtool.source.checks import check_finite
from tqtool.source.config import text_config
from tqtool.source.fingerprint import fingerprint
from tqtool.transform.plan import Role, TransformPlan

if TYPE_CHECKING:
    from tqtool.calibration.forward import StreamedModel

LOCK_NAME = ".lock"

Array = NDArray[np.float32]
Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """What to run.

    Attributes:
        source: Folder or hub id.
        out: Folder to create, or with ``resume`` to finish.
        text: Plain text or JSONL; see ``rows.read_rows``.
        rows: Sequences.
        context: Tokens of a sequence at most.
        revision: Of a hub id.
        rotation_seed: None means the unrotated basis.
        disjoint_from: Teacher dumps that must not share text with the calibration.
        resume: Continue an interrupted run of the same request.
    """

    source: str
    out: Path
    text: Path
    rows: int = 128
    context: int = 512
    revision: str | None = None
    rotation_seed: int | None = None
    disjoint_from: tuple[Path, ...] = ()
    resume: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationJob:
    """A validated request: everything is known but the sums."""

    request: CalibrationRequest
    checkpoint: Checkpoint
    plan: TransformPlan
    rows: CalibrationRows
    tokenizer_sha256: str
    fingerprint: str
    hidden: int
    layers: int
    peak_memory_bytes: int
    disk_bytes: int

    def key(self) -> str:
        """Names the run: two with the same key give the same bytes."""
        facts = [
            [self.fingerprint, self.plan.id, self.plan.seed, self.tokenizer_sha256, RATIO, MAX_SINKS],
            self.rows.record.model_dump(mode="json"),
            [self.request.context, _tools()],
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def plan_calibration(request: CalibrationRequest) -> CalibrationJob:
    """Open source and text, resolve the transform, check the target; no large tensor is read.

    Raises:
        UserError: see ``open_checkpoint``, ``read_rows``; a dump that shares text; ``out`` is taken or of another run.
        ArtifactError: ``out`` cannot be written.
    """
    checkpoint = open_checkpoint(request.source, revision=request.revision)
    plan = plan_transform(checkpoint, rotation_seed=request.rotation_seed)
    tokenizer = load_tokenizer(checkpoint.path)
    rows = read_rows(tokenizer, request.text, rows=request.rows, context=request.context)
    embedding = next(output for output in plan.outputs if output.role is Role.EMBEDDING)
    vocabulary, hidden = embedding.shape
    largest = max(int(sequence.max()) for sequence in rows.sequences)
    if largest >= vocabulary:
        raise UserError(f"token {largest}, the model has {vocabulary}", hint="the tokenizer is of another model")
    vocabulary_sha256 = tokenizer_hash(tokenizer)
    for path in request.disjoint_from:
        dump = open_dump(path)
        if dump.info.tokenizer_hash != vocabulary_sha256:
            raise UserError(f"{path}: a dump of another tokenizer, so its text cannot be told from the calibration's")
        require_disjoint(rows, (dump.tokens(index) for index in range(dump.info.windows)), str(path))
    layers = {output.layer for output in plan.outputs} - {None}
    job = CalibrationJob(
        request=request,
        checkpoint=checkpoint,
        plan=plan,
        rows=rows,
        tokenizer_sha256=vocabulary_sha256,
        fingerprint=fingerprint(checkpoint),
        hidden=hidden,
        layers=len(layers),
        **estimates(
            plan,
            tokens=rows.record.tokens,
            longest=max(sequence.size for sequence in rows.sequences),
            hidden=hidden,
            top=int(text_config(checkpoint.config).get("num_experts_per_tok", 1)),
        ),
    )
    _check_target(job)
    return job


def _check_target(job: CalibrationJob) -> None:
    out = job.request.out
    if (out / INFO_NAME).exists():
        raise UserError(f"{out}: holds a finished calibration", hint="choose another OUT")
    if (out / PROGRESS_NAME).exists():
        if not job.request.resume:
            raise UserError(f"{out}: holds an interrupted calibration", hint="--resume finishes it")
        if read_state(out).key != job.key():
            raise UserError(f"{out}: was begun with another source, text or setting", hint="choose another OUT")
    elif out.exists() and (not out.is_dir() or any(path.name != LOCK_NAME for path in out.iterdir())):
        raise UserError(f"{out}: exists and is not empty", hint="choose another OUT")
    check_writable(out / INFO_NAME)


def calibrate(job: CalibrationJob, tick: Tick = lambda layers: None) -> CalibrationInfo:
    """Run ``job``; ``tick(1)`` after each layer, also for layers that an earlier run has finished.

    Memory: two copies of the hidden states, one layer in float32, ``8·in²`` bytes for each of its four inputs.

    Raises:
        NumericalError: a weight is not finite, or no sequence's hidden state is.
        ArtifactError: writing failed, or another run writes the same folder.
    """
    ensure_blas()
    from tqtool.calibration.forward import StreamedModel  # imports mlx, which must find the BLAS in place

    out = job.request.out
    is_ours = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    with _only_writer(out, is_ours=is_ours):
        require_disk(out, job.disk_bytes)
        state = read_state(out) if (out / PROGRESS_NAME).exists() else None
        if state is None:
            check_finite(job.checkpoint)
            state = State(key=job.key())
        model = StreamedModel(job.checkpoint, job.plan)
        hidden = (
            load_hidden(out, state, job.rows.sequences)
            if state.layers_done
            else [model.begin(row) for row in job.rows.sequences]
        )
        tick(state.layers_done)
        for index in range(state.layers_done, model.depth):
            hidden = _layer(job, model, index, hidden, state)
            tick(1)
        return _finish(job, model, hidden, state)


def _layer(job: CalibrationJob, model: StreamedModel, index: int, hidden: list[Array], state: State) -> list[Array]:
    model.fill(index)
    readers = model.readers(index, hidden[state.kept(len(hidden))[0]])
    stacks = [f"{block}.{name}" for block in readers.routers for name in ("gate_proj", "down_proj")]
    inputs = LayerInputs({stack: len(model.parts(stack)) for stack in stacks})
    for at in state.kept(len(hidden)):
        entering, seen = hidden[at], Seen()
        leaving = model.run(index, entering, seen)
        if not np.isfinite(leaving).all():  # neither in this layer's sums nor in later ones
            state.dropped[at] = index
            hidden[at] = np.zeros_like(leaving)
            continue
        inputs.add(seen, sink_rows(entering, leaving, ratio=RATIO))
        hidden[at] = leaving
    if not state.kept(len(hidden)):
        raise NumericalError(
            f"layer {index}: no sequence's hidden state is finite",
            hint="the weights overflow in float32: is the checkpoint whole, and does eval ppl work on it?",
        )
    model.empty(index)
    file = f"layer-{index:05d}.safetensors"
    found = [_dense_input(key, readers.dense[key], total) for key, total in inputs.dense.items()]
    for stack, rows in inputs.routed.items():
        block, _, name = stack.rpartition(".")
        router = readers.routers[block]
        found += _expert_inputs(model, stack, rows, router if name == "gate_proj" else None)
        if name == "gate_proj":
            state.routing.append(RoutingRecord(block=block, router=router, tokens=rows.tokens()))
    _write_inputs(job.request.out, file, found, state)
    old, state.layers_done = state.layers_done, index + 1
    whole = np.concatenate(hidden)
    write_tensors(job.request.out / state_file(index + 1), {"hidden": whole.shape}, [whole])
    state.files[state_file(index + 1)] = hash_file(job.request.out / state_file(index + 1))
    state.files.pop(state_file(old), None)
    write_state(job.request.out, state)
    (job.request.out / state_file(old)).unlink(missing_ok=True)
    return hidden


def _finish(job: CalibrationJob, model: StreamedModel, hidden: list[Array], state: State) -> CalibrationInfo:
    """The head's input, then ``calibration.json``; what only a resume needs goes."""
    out = job.request.out
    head = next((output.module for output in job.plan.outputs if output.role is Role.HEAD), None)
    table = next(output.module for output in job.plan.outputs if output.role is Role.EMBEDDING)
    module = head or table
    assert module is not None, "an embedding is a module"
    total = InputSum(job.hidden)
    for at in state.kept(len(hidden)):
        total.add(model.head_input(hidden[at]), sink_rows(hidden[at], hidden[at], ratio=RATIO))
    _write_inputs(out, TAIL_FILE, [_dense_input(module, [module], total)], state)
    info = CalibrationInfo(
        model_type=job.checkpoint.model_type,
        source_fingerprint=job.fingerprint,
        transform=job.plan.id,
        rotation_seed=job.plan.seed,
        tokenizer_sha256=job.tokenizer_sha256,
        text=job.rows.record,
        context=job.request.context,
        sink_ratio=RATIO,
        dropped=state.dropped_list(),
        inputs=state.inputs,
        routing=state.routing,
        files={name: digest for name, digest in state.files.items() if not name.startswith("state-")},
        tools=_tools(),
    )
    with whole_file(out / INFO_NAME) as (file, _):
        file.write(encode(info))
    for path in (out / PROGRESS_NAME, *out.glob("state-*.safetensors"), out / LOCK_NAME):
        path.unlink(missing_ok=True)
    return info


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    """One input that is about to be written: its record as far as it is known, and how to get its sum.

    Sums of experts are made one at a time, when their turn to be written comes.
    """

    key: str
    modules: list[str]
    wider: str | None
    width: int
    sinks: int
    is_read: bool
    total: Callable[[], InputSum]

    def record(self, file: str, total: InputSum | None) -> InputRecord:
        """The row of ``calibration.json``."""
        return InputRecord(
            key=self.key,
            file=file,
            modules=self.modules,
            width=self.width,
            rows=0 if total is None else total.moments.rows,
            sinks=self.sinks,
            dropped=0 if total is None else total.moments.dropped,
            wider=self.wider,
        )


def _dense_input(key: str, modules: list[str], total: InputSum) -> _Input:
    return _Input(
        key=key,
        modules=modules,
        wider=None,
        width=total.moments.width,
        sinks=len(total.sinks),
        is_read=True,
        total=lambda: total,
    )


def _expert_inputs(model: StreamedModel, stack: str, found: ExpertInputs, wider: str | None) -> Iterator[_Input]:
    """One input an expert; those of gate_proj are read by up_proj too."""
    readers = [stack]
    if stack.endswith(".gate_proj"):
        readers.append(f"{stack.removesuffix('.gate_proj')}.up_proj")
    parts = [model.parts(reader) for reader in readers]
    sums = found.sums()

    def total() -> InputSum:
        made = next(each for each in sums if each is not None)
        return made

    for modules, sinks, tokens in zip(zip(*parts, strict=True), found.sinks(), found.tokens(), strict=True):
        yield _Input(
            key=modules[0],
            modules=list(modules),
            wider=wider,
            width=found.width,
            sinks=sinks,
            is_read=tokens > 0,
            total=total,
        )


def _write_inputs(out: Path, file: str, inputs: Sequence[_Input], state: State) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for each in inputs:
        if each.is_read:
            shapes[f"{each.key}.hessian"] = (each.width * (each.width + 1) // 2,)
            shapes[f"{each.key}.sinks"] = (each.sinks, each.width)

    def arrays() -> Iterator[Array]:
        for each in inputs:
            total = each.total() if each.is_read else None
            state.inputs.append(each.record(file, total))
            if total is not None:
                yield pack_triangle(total.matrix())
                yield total.stacked()

    write_tensors(out / file, shapes, arrays())
    state.files[file] = hash_file(out / file)


@contextmanager
def _only_writer(out: Path, *, is_ours: bool) -> Iterator[None]:
    """Hold OUT for this process; the kernel lets go when it dies. A folder of ours goes if nothing came into it."""
    handle, held = os.open(out / LOCK_NAME, os.O_CREAT | os.O_RDWR), False
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ArtifactError(f"{out}: another run is calibrating into it", hint="wait for it") from error
        held = True
        yield
    finally:
        if held and all(path.name == LOCK_NAME for path in out.iterdir()):  # it failed before anything was there
            (out / LOCK_NAME).unlink()
            if is_ours:
                out.rmdir()
        os.close(handle)


def _tools() -> dict[str, str]:
    names: Sequence[str] = ("tqtool", "mlx", "mlx-lm", "numpy")
    return {name: importlib.metadata.version(name) for name in names}
