"""A process that holds one model and measures it when asked: so that its memory is its own, and arms can take turns.

``python -m tqtool.runtime.speed_worker`` reads JSON objects from stdin, one a line, and answers each with one on the
pipe that stdout was: first what to load, then points. ``Worker`` is the other end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Literal, Self

from tqtool.errors import ArtifactError, BackendError, NumericalError, TqError, UserError
from tqtool.kv.scheme import parse_options
from tqtool.runtime.speed import Point, Run, measure

Engine = Literal["tqtool", "mlx-lm"]
KINDS: dict[str, type[TqError]] = {
    kind.__name__: kind for kind in (UserError, ArtifactError, NumericalError, BackendError)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """Which model, and how.

    Attributes:
        model: Folder or hub id.
        engine: ``tqtool`` loads it as ``tqtool generate`` does, ``mlx-lm`` as stock mlx-lm alone would.
        compute: ``packed`` or ``expand``, for tqtool.
        activations: ``float`` or ``int8``, for tqtool.
        prompts: Numbers of prompt tokens whose paths are to be explained.
    """

    model: str
    engine: Engine = "tqtool"
    compute: str = "packed"
    activations: str = "float"
    prompts: tuple[int, ...] = ()


class Worker:
    """A child process with a model in it; a context manager."""

    def __init__(self, request: LoadRequest) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tqtool.runtime.speed_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._request = request
        self.facts: dict[str, Any] = {}
        """What ``describe`` says, once the model is loaded."""

    def __enter__(self) -> Self:
        try:
            self.facts = self._ask(asdict(self._request))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def run(self, prompt_tokens: int, new_tokens: int, kv: str | None, kv_start: int = 0) -> Run:
        """One run; errors of the child are raised here."""
        asked = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "kv": kv, "kv_start": kv_start}
        return Run(**self._ask(asked))

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "opened as a pipe"
        assert stdout is not None, "opened as a pipe"
        try:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise BackendError(
                f"{self._request.model}: the process that measured it ended with {code}",
                hint="killed for memory? fewer prompt tokens, or a smaller model",
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise KINDS.get(answer["kind"], BackendError)(answer["error"], hint=answer["hint"])
        return answer

    def _end(self) -> None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the other end says what becomes of us
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    model: Any = None
    vocabulary = 0
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if model is None:
                asked["prompts"] = tuple(asked["prompts"])
                model, vocabulary, answer = _load(LoadRequest(**asked))
            else:
                point = Point(
                    prompt_tokens=asked["prompt_tokens"],
                    new_tokens=asked["new_tokens"],
                    kv=parse_options(asked["kv"], asked["kv_start"]),
                )
                answer = asdict(measure(model, vocabulary, point))
        except TqError as error:
            kind = next((name for name, each in KINDS.items() if isinstance(error, each)), "BackendError")
            answer = {"error": error.message, "hint": error.hint, "kind": kind}
        except Exception as error:  # noqa: BLE001 - the other end raises it
            answer = {"error": f"{type(error).__name__}: {error}", "hint": None, "kind": "BackendError"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _load(request: LoadRequest) -> tuple[Any, int, dict[str, Any]]:
    """The model, the size of its vocabulary, and what to say of both."""
    from time import perf_counter

    started = perf_counter()
    loaded = _stock(request) if request.engine == "mlx-lm" else _own(request)
    model, config, facts = loaded
    facts["load_s"] = perf_counter() - started
    nested = config.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else {}
    vocabulary = config.get("vocab_size") or text.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise UserError(f"{request.model}: its config.json names no vocab_size")
    facts["positions"] = config.get("max_position_embeddings") or text.get("max_position_embeddings")
    return model, vocabulary, facts


def _own(request: LoadRequest) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    from tqtool.runtime.load import load

    loaded = load(request.model, compute=request.compute, activations=request.activations)  # type: ignore[arg-type]
    # Not before: this imports MLX, whose BLAS ``load`` puts in place.
    from tqtool.runtime.machine import machine_facts
    from tqtool.runtime.paths import counted_paths

    report = loaded.report
    facts = {
        "machine": asdict(machine_facts()),
        "blas": {"status": report.blas.status.value, "library": report.blas.library},
        "weight_bytes": report.file_bytes,
        "dtype": report.dtype,
        "compute": report.compute,
        "activations": report.activations,
        "fused": report.n_fused,
        "joined": report.n_joined,
        "layers": counted_paths(loaded.model, (1, *request.prompts)),
    }
    return loaded.model, loaded.config, facts


def _stock(request: LoadRequest) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """As mlx-lm does it alone: its types, its layers, its BLAS.

    Code that comes with a model is executed only if it is the file that tqtool ships.
    """
    from mlx_lm import load
    from mlx_lm.utils import load_config

    from tqtool.artifact.model_file import MODEL_FILE, model_file
    from tqtool.runtime.load import model_folder
    from tqtool.runtime.machine import machine_facts

    folder = model_folder(request.model)
    shipped = folder / MODEL_FILE
    is_ours = shipped.is_file() and shipped.read_bytes() == model_file()
    model, _ = load(str(folder), trust_remote_code=is_ours)
    facts = {
        "machine": asdict(machine_facts()),
        "blas": {"status": "untouched", "library": "what MLX links"},
        "weight_bytes": sum(file.stat().st_size for file in folder.glob("model*.safetensors")),
        "dtype": None,
        "compute": "packed",
        "activations": "float",
        "fused": 0,
        "joined": 0,
        "layers": [],
    }
    return model, load_config(folder), facts


if __name__ == "__main__":
    main()
