"""Load an artifact in stock mlx-lm, in a process of its own, and say what came out.

The child (``python -m tqtool.artifact.reload FOLDER --depth forward``) keeps mlx-lm and the weights out of the
converter's memory and prints one JSON object. It loads ``.`` from inside the folder: mlx-lm globs the path it is given,
so that ``[``, ``*`` or ``?`` in it would find nothing or something else. Nothing here knows the artifact: it reports
what a stranger's loader built, and ``compare_modules`` holds that against the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tqtool.artifact.leftovers import final_path
from tqtool.errors import ArtifactError, BackendError, UserError
from tqtool.solve.quantizer import ConfigEntry

Depth = Literal["load", "forward", "none"]
_IMPORT_FAILED = 70
_REFUSED = 71
_SHOWN_LINES = 4
"""Lines of an error message that are shown; mlx-lm lists every parameter it misses."""
_PROBE_TOKENS = (1, 2, 3, 5, 8, 13)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModule:
    """One quantizable module as mlx-lm built it; ``bits`` is None for a dense one."""

    kind: str
    bits: int | None
    group_size: int | None
    mode: str | None

    def __str__(self) -> str:
        return self.kind if self.bits is None else f"{self.kind} {self.mode} {self.bits} bits g{self.group_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadReport:
    """What the child found; ``n_logits`` is 0 when no forward was asked for."""

    modules: Mapping[str, LoadedModule]
    n_logits: int
    mlx_lm_version: str


def parse_depth(text: str) -> Depth:
    """``forward``, ``load`` or ``none``, as ``--check`` takes it."""
    known: dict[str, Depth] = {"forward": "forward", "load": "load", "none": "none"}
    if text not in known:
        raise UserError(f"--check {text!r} is unknown", hint=f"one of {', '.join(known)}")
    return known[text]


def reload_stock(folder: Path, *, depth: Depth, trust_remote_code: bool = False) -> ReloadReport:
    """Strict lazy load of ``folder`` in stock mlx-lm and, for ``forward``, one pass over a few tokens.

    Raises:
        ArtifactError: mlx-lm refuses the folder, a logit is not finite, or the child ended without an answer.
        BackendError: mlx-lm cannot be imported, or the child was killed.
    """
    command = [sys.executable, "-P", "-m", "tqtool.artifact.reload", str(folder), "--depth", depth]
    if trust_remote_code:
        command.append("--trust-remote-code")
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, env=_child_environment()
    )
    name = final_path(folder)
    if done.returncode == _IMPORT_FAILED:
        raise BackendError(f"mlx-lm cannot be imported: {_told(done.stderr)}", hint="--check none skips it")
    if done.returncode < 0:
        raise BackendError(
            f"the process that loads {name} in mlx-lm was killed by {_signal_name(-done.returncode)}",
            hint="memory may have run out: --check load reads no weights and needs little",
        )
    if done.returncode != 0:
        told = _told(done.stderr).replace(str(folder), str(name))
        raise ArtifactError(f"stock mlx-lm does not load {name}: {told}")
    try:
        report, finite = _read_answer(done.stdout)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ArtifactError(
            f"the process that loads {name} in mlx-lm ended without an answer: {_told(done.stderr or done.stdout)}"
        ) from error
    if not finite:
        raise ArtifactError(f"{name}: one forward in stock mlx-lm gave logits that are not finite")
    return report


def _read_answer(text: str) -> tuple[ReloadReport, bool]:
    answer = json.loads(text)
    report = ReloadReport(
        modules={path: LoadedModule(**module) for path, module in answer["modules"].items()},
        n_logits=answer["n_logits"],
        mlx_lm_version=answer["mlx_lm_version"],
    )
    return report, answer["finite"]


def compare_modules(report: ReloadReport, entries: Mapping[str, ConfigEntry]) -> tuple[str, ...]:
    """Differences between the loaded model and the plan, one line each; empty when they agree."""
    problems = []
    for path, entry in entries.items():
        module = report.modules.get(path)
        if entry is None:
            continue
        if module is None:
            problems.append(f"{path}: planned, but mlx-lm built no such module")
        elif entry is False and module.bits is not None:
            problems.append(f"{path}: planned dense, loaded as {module}")
        elif entry is not False:
            found = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
            if found != entry:
                problems.append(f"{path}: planned {_entry_text(entry)}, loaded as {module}")
    problems += [f"{path}: {report.modules[path]} is not in the plan" for path in report.modules if path not in entries]
    return tuple(problems)


def _entry_text(entry: Mapping[str, Any]) -> str:
    return f"{entry['mode']} {entry['bits']} bits g{entry['group_size']}"


def _child_environment() -> dict[str, str]:
    return {**os.environ, "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _told(stderr: str) -> str:
    """The error that ``stderr`` ends with, in one line: type and message, without traceback and earlier warnings."""
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
    if starts:
        lines = lines[starts[-1] + 1 :]
        while lines and lines[0].startswith(" "):
            del lines[0]
    shown = lines[:_SHOWN_LINES] if starts else lines[-_SHOWN_LINES:]
    if not shown:
        return "no message"
    left = len(lines) - len(shown)
    more = f" (and {left} more lines)" if starts and left else ""
    return " ".join(line.strip() for line in shown) + more


def _inspect(depth: Depth, trust_remote_code: bool) -> dict[str, Any]:
    """What stock mlx-lm makes of the current folder."""
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.utils import load_model

    model, config = load_model(Path(), lazy=True, strict=True, trust_remote_code=trust_remote_code)
    modules = {path: asdict(_module(module)) for path, module in _quantizable(model)}
    finite, n_logits = True, 0
    if depth == "forward":
        vocab = int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size", 2))
        mx.set_cache_limit(0)  # what a layer frees goes back to the system, not to the next one
        _stream_layers(model)
        logits = model(mx.array([[token % vocab for token in _PROBE_TOKENS]]))
        finite, n_logits = bool(mx.isfinite(logits).all().item()), int(logits.size)
    return {
        "modules": modules,
        "finite": finite,
        "n_logits": n_logits,
        "mlx_lm_version": str(mlx_lm.__version__),
    }


def decoder_layers(model: Any) -> list[Any] | None:
    """The list that an mlx-lm model runs its layers from, to be changed in place; None if it has none.

    ``model.layers`` is what mlx-lm promises, and in some models a copy of it: the list itself is the one in the module
    tree with the same layers.
    """
    promised = getattr(model, "layers", None)
    if not isinstance(promised, list) or not promised:
        return None
    held = (value for module in model.modules() for value in module.values() if isinstance(value, list))
    return next((value for value in held if len(value) == len(promised) and value[0] is promised[0]), None)


def _stream_layers(model: Any) -> None:
    """Make every decoder layer forget its weights once it has run, so that one forward holds one layer at a time.

    A model without such a list is run as it is.
    """
    layers = decoder_layers(model)
    if layers is not None:
        layers[:] = [_StreamedLayer(layer) for layer in layers]


class _StreamedLayer:
    """A decoder layer for one call; everything but the call is the layer's own."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        import mlx.core as mx
        from mlx.utils import tree_map

        if mx.default_device().type == mx.cpu:
            _widen_experts(self._layer)
        result = self._layer(*arguments, **options)
        mx.eval(result)
        self._layer.update(tree_map(lambda array: mx.zeros(0), self._layer.parameters()))
        return result


def _widen_experts(layer: Any) -> None:
    """Dense experts of ``layer`` in float32: on a CPU MLX multiplies no others (0.32.4), whatever wrote them."""
    import mlx.core as mx
    from mlx_lm.models.switch_layers import SwitchLinear

    for module in layer.modules():
        if type(module) is SwitchLinear:
            module.weight = module.weight.astype(mx.float32)


def _quantizable(model: Any) -> list[tuple[str, Any]]:
    return [
        (path, module)
        for path, module in model.named_modules()
        if hasattr(module, "to_quantized") or isinstance(getattr(module, "bits", None), int)
    ]


def _module(module: Any) -> LoadedModule:
    return LoadedModule(
        kind=type(module).__name__,
        bits=getattr(module, "bits", None),
        group_size=getattr(module, "group_size", None),
        mode=getattr(module, "mode", None),
    )


def main() -> int:
    """Entry point of the child."""
    parser = argparse.ArgumentParser(prog="tqtool.artifact.reload")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--depth", choices=("load", "forward"), default="forward")
    parser.add_argument("--trust-remote-code", action="store_true")
    arguments = parser.parse_args()
    try:
        import mlx_lm.utils  # noqa: F401
    except ImportError as error:
        sys.stderr.write(f"{error}\n")
        return _IMPORT_FAILED
    stdout, sys.stdout = sys.stdout, sys.stderr  # whatever mlx-lm prints is not the answer
    try:
        os.chdir(arguments.folder)
        answer = _inspect(arguments.depth, arguments.trust_remote_code)
    except Exception:  # noqa: BLE001 - the parent says it in one line
        traceback.print_exc()
        return _REFUSED
    json.dump(answer, stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
