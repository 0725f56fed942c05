"""The plan held against what a loader built; the child process itself is tested end to end."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.support.command import run
from tests.support.conversions import convert
from tests.support.reloading import CAN_FORK, Reloader
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.artifact import reload as reload_module
from tqtool.artifact.reload import LoadedModule, ReloadReport, compare_modules, decoder_layers, reload_stock
from tqtool.errors import ArtifactError, BackendError, TqError

Q4 = {"group_size": 64, "bits": 4, "mode": "affine"}
DENSE = LoadedModule(kind="Linear", bits=None, group_size=None, mode=None)
PACKED = LoadedModule(kind="QuantizedLinear", bits=4, group_size=64, mode="affine")


def report(**modules: LoadedModule) -> ReloadReport:
    return ReloadReport(modules=modules, n_logits=0, mlx_lm_version="0")


def test_agreement() -> None:
    entries: dict[str, Any] = {"a": Q4, "b": False, "c": None}
    assert compare_modules(report(a=PACKED, b=DENSE), entries) == ()
    assert compare_modules(report(a=PACKED, b=DENSE, c=DENSE), entries) == ()


@pytest.mark.parametrize(
    ("module", "entry", "message"),
    [
        (PACKED, {**Q4, "bits": 8}, "a: planned affine 8 bits g64, loaded as QuantizedLinear affine 4 bits g64"),
        (PACKED, {**Q4, "group_size": 32}, "a: planned affine 4 bits g32, loaded as"),
        (PACKED, {**Q4, "mode": "mxfp4"}, "a: planned mxfp4 4 bits g64, loaded as"),
        (PACKED, False, "a: planned dense, loaded as QuantizedLinear"),
        (DENSE, Q4, "a: planned affine 4 bits g64, loaded as Linear"),
    ],
)
def test_differences(module: LoadedModule, entry: Any, message: str) -> None:
    problems = compare_modules(report(a=module), {"a": entry})
    assert len(problems) == 1
    assert problems[0].startswith(message)


def test_missing_and_extra_modules() -> None:
    assert compare_modules(report(), {"a": False}) == ("a: planned, but mlx-lm built no such module",)
    assert compare_modules(report(a=DENSE), {}) == ("a: Linear is not in the plan",)


def test_a_bias_is_no_difference() -> None:
    """Bits, group and mode are compared; biases, like every parameter, are the strict load's business (see below)."""
    entries: dict[str, Any] = {"a": Q4}
    for change in ({"bits": None}, {"group_size": None}, {"mode": None}):
        assert len(compare_modules(report(a=replace(PACKED, **change)), entries)) == 1


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.v_proj.bias"])
def test_a_bias_that_is_lost_is_red(tmp_path: Path, name: str) -> None:
    """In the real mlx-lm, and the message names the bias and the artifact, not the folder it lies in for now."""
    convert(write_tiny(tmp_path / "source", Tiny(model_type="qwen2")), tmp_path / "good")
    folder = (tmp_path / "good").rename(tmp_path / ".out.partial-77")
    assert len(reload_stock(folder, depth="load").modules) == 15
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ArtifactError) as caught:
        reload_stock(folder, depth="load")
    assert f"{tmp_path / 'out'}: ValueError: Missing 1 parameters: {name}" in caught.value.message.replace("\n", " ")
    assert "partial" not in caught.value.message


@pytest.mark.skipif(not CAN_FORK, reason="a GPU's runtime does not survive a fork")
def test_forks_of_a_process_that_has_imported_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``tests/support/reloading.py`` puts in place of a process, for a good artifact and a bad one."""
    convert(write_tiny(tmp_path / "source"), tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    tensors = load_file(tmp_path / "bad" / "model.safetensors")
    tensors["model.layers.0.extra"] = tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "bad" / "model.safetensors")

    def said() -> tuple[ReloadReport, str]:
        with pytest.raises(ArtifactError) as caught:
            reload_stock(Path("bad"), depth="forward")
        return reload_stock(Path("good"), depth="forward"), caught.value.message

    monkeypatch.chdir(tmp_path)
    fresh = said()
    assert "Received 1 parameters not in model" in fresh[1]
    with Reloader() as reloader:
        monkeypatch.setattr(reload_module, "subprocess", reloader)
        assert [said(), said()] == [fresh, fresh]


def answer_with(monkeypatch: pytest.MonkeyPatch, code: int, stdout: str = "", stderr: str = "") -> None:
    done = subprocess.CompletedProcess([], code, stdout, stderr)
    monkeypatch.setattr(reload_module.subprocess, "run", lambda *a, **k: done)


TRACEBACK = "a warning\nTraceback (most recent call last):\n  File x\n    code\n"


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "kind", "message"),
    [
        (
            71,
            "",
            TRACEBACK + "ValueError: Missing 2:\na,\nb.\n",
            ArtifactError,
            "mlx-lm does not load x/out: ValueError: Missing 2: a, b.",
        ),
        (
            71,
            "",
            TRACEBACK + "E: 1\n" + "  2\n" * 9,
            ArtifactError,
            "mlx-lm does not load x/out: E: 1 2 2 2 (and 6 more lines)",
        ),
        (71, "", TRACEBACK + "E: in x/.out.partial-7/y\n", ArtifactError, "mlx-lm does not load x/out: E: in x/out/y"),
        (1, "", "usage\nno such option\n", ArtifactError, "mlx-lm does not load x/out: usage no such option"),
        (1, "", "", ArtifactError, "mlx-lm does not load x/out: no message"),
        (-9, "", "", BackendError, "the process that loads x/out in mlx-lm was killed by SIGKILL"),
        (-6, "", "", BackendError, "killed by SIGABRT"),
        (-99, "", "", BackendError, "killed by signal 99"),
        (
            70,
            "",
            TRACEBACK + "ImportError: No module named mlx_lm",
            BackendError,
            "cannot be imported: ImportError: No module",
        ),
        (0, "", "", ArtifactError, "the process that loads x/out in mlx-lm ended without an answer: no message"),
        (0, "hello", "", ArtifactError, "ended without an answer: hello"),
        (0, "[]", "", ArtifactError, "ended without an answer"),
        (0, "{}", "", ArtifactError, "ended without an answer"),
        (0, '{"modules": {"a": {}}}', "", ArtifactError, "ended without an answer"),
        (0, "[" * 100_000, "", ArtifactError, "ended without an answer"),
        (
            0,
            '{"finite": false, "modules": {}, "n_logits": 3, "mlx_lm_version": "0"}',
            "",
            ArtifactError,
            "x/out: one forward .* not finite",
        ),
    ],
)
def test_failures_of_the_child(
    monkeypatch: pytest.MonkeyPatch, code: int, stdout: str, stderr: str, kind: type[TqError], message: str
) -> None:
    """The artifact is called what the user called it; the temporary folder is ours."""
    answer_with(monkeypatch, code, stdout, stderr)
    with pytest.raises(kind) as caught:
        reload_stock(Path("x/.out.partial-7"), depth="forward")
    assert re.search(message if ".*" in message else re.escape(message), caught.value.message)
    assert "\n" not in caught.value.message
    assert "memory" in (caught.value.hint or "memory") or code == 70


@pytest.mark.parametrize("form", ["convert", "trellis"])
def test_paths_that_mlx_lm_takes_for_patterns(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work is done and checked all the same; the note says what stock mlx-lm makes of such a path."""
    source, parent = write_tiny(tmp_path / "source"), tmp_path / "[ab] *"
    parent.mkdir()
    decoy = tmp_path / "a x"  # what the pattern would match
    decoy.mkdir()
    out = parent / "o[u]t?"
    answer = run(capsys, monkeypatch, form, source, out, *(["--k", 3] if form == "trellis" else []))
    assert answer.code == 0, answer.err
    assert f"in {out} for a pattern" in answer.err
    assert run(capsys, monkeypatch, "verify", out).code == 0
    monkeypatch.chdir(parent)
    assert run(capsys, monkeypatch, "verify", out.name).code == 0


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_the_list_of_layers_is_the_one_that_runs(model_type: str) -> None:
    """qwen2's model.layers is a copy: changing it would change nothing."""
    from mlx_lm.utils import _get_classes

    config = Tiny(model_type=model_type).config()
    build, arguments = _get_classes(config)
    model = build(arguments.from_dict(config))
    layers = decoder_layers(model)
    assert layers is not None
    layers[:] = []
    assert not [path for path, _ in model.named_modules() if ".layers." in path]
