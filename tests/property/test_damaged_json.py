"""Any JSON in the place of an artifact's JSON: ``verify`` answers with exit code 4 or a pass, never a crash."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import run
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.artifact import verify
from tqtool.artifact.verify import VerifyReport, verify_artifact
from tqtool.errors import ArtifactError, TqError
from tqtool.formats.manifest import MANIFEST_NAME
from tqtool.pipeline.trellis import TrellisRequest, plan_trellis
from tqtool.solve.trellis import TrellisOptions

INDEX = "model.safetensors.index.json"
TINY = Tiny(hidden=64, intermediate=128, heads=2, kv_heads=1, head_dim=32, layers=1, vocab=40)
Q_PROJ, UP_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 4, 12.0, 3.5, 1 << 70, 10**300, float("nan"), float("inf")),
    *("", "64", "affine", "../x", "\ud800", "\0", "x" * 5000, [], [1], [[]], {}, {"a": 1}, {"\ud800": 1}),
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trellis in the MLP, affine elsewhere: every kind of entry that config.json has."""
    root = tmp_path_factory.mktemp("damaged")
    source, options = write_tiny(root / "source", TINY), TrellisOptions(k=3, warmup=8)
    plan_trellis(TrellisRequest(source=str(source), out=root / "artifact", options=options)).run()
    return root / "artifact"


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "artifact")


def text(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def write_manifest(artifact: Path, body: Any) -> None:
    """With the digest that a manifest of this content must have."""
    if isinstance(body, dict):
        body.pop("digest", None)
        body = {**body, "digest": hashlib.sha256(text(body)).hexdigest()}
    (artifact / MANIFEST_NAME).write_bytes(text(body))


def write_file(artifact: Path, name: str, data: bytes) -> None:
    """``data``, and a manifest that agrees with it."""
    (artifact / name).write_bytes(data)
    body = json.loads((artifact / MANIFEST_NAME).read_bytes())
    body["files"][name] = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write_manifest(artifact, body)


def verdict(artifact: Path) -> VerifyReport | TqError:
    """What ``verify`` says; any other exception fails the test. Every line must be one that can be printed."""
    try:
        report = verify_artifact(artifact, depth="none")
    except TqError as error:
        if error.exit_code != 4:
            raise AssertionError(f"exit code {error.exit_code}: {error}") from error
        return error
    for check in report.checks:
        for line in (check.detail, *check.problems):
            assert "\n" not in line
            line.encode()
    if not report.is_good:
        with pytest.raises(ArtifactError):
            report.require()
    return report


def first_problem(artifact: Path) -> str:
    found = verdict(artifact)
    if isinstance(found, TqError):
        return found.message
    return next(check.problems[0] for check in found.checks if check.status == "fail")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every value inside ``value``."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


def mutated(document: Any, rng: random.Random) -> Any:
    """``document`` with one or two values replaced, dropped, wrapped, doubled or renamed."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 2))):
        path = rng.choice(places(document))
        if not path:
            return rng.choice(VALUES) if rng.random() < 0.2 else document
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        key = path[-1]
        act = rng.choice(("replace", "replace", "replace", "drop", "wrap", "rename"))
        if act == "replace":
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif act == "wrap":
            holder[key] = [holder[key]]
        elif act == "drop":
            del holder[key]
        elif isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        else:
            holder.append(holder[key])
    return document


@pytest.mark.parametrize("name", ["config.json", MANIFEST_NAME, INDEX])
def test_random_damage(artifact: Path, name: str) -> None:
    original = json.loads((artifact / name).read_bytes())
    manifest = (artifact / MANIFEST_NAME).read_bytes()
    outcomes = {"good": 0, "red": 0, "refused": 0}
    for seed in range(150):
        document = mutated(original, random.Random(seed))
        (artifact / MANIFEST_NAME).write_bytes(manifest)
        if name == MANIFEST_NAME:
            write_manifest(artifact, document)
        else:
            write_file(artifact, name, text(document))
        try:
            found = verdict(artifact)
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}: {type(error).__name__}: {error}") from error
        outcomes["refused" if isinstance(found, TqError) else "good" if found.is_good else "red"] += 1
        if isinstance(found, VerifyReport):
            lines = [line for check in found.checks for line in check.problems]
            unforeseen = [line for line in lines if "cannot be checked" in line]
            assert not unforeseen, f"{name}, seed {seed}: {unforeseen[0]}"
    assert outcomes["red"] + outcomes["refused"] > 30, outcomes


def everywhere(**entry: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for key in ("quantization", "quantization_config"):
            config[key][Q_PROJ] = {**config[key][Q_PROJ], **entry}

    return change


def section(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(quantization=value, quantization_config=value)


def trellis(**entry: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["trellis"]["modules"][UP_PROJ].update(entry)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (section(5), "quantization: expected an object, found 5"),
        (section([]), r"quantization: expected an object, found \[\]"),
        (section(None), "quantization: expected an object, found None"),
        (lambda c: [c[k].update({Q_PROJ: 7}) for k in ("quantization", "quantization_config")], f"{Q_PROJ}: .*found 7"),
        (lambda c: [c[k].update({Q_PROJ: None}) for k in ("quantization", "quantization_config")], "found None"),
        (lambda c: [c[k].update({Q_PROJ: True}) for k in ("quantization", "quantization_config")], "found True"),
        (lambda c: [c[k].update(bits="4") for k in ("quantization", "quantization_config")], "bits: expected int"),
        (everywhere(group_size="64"), "group_size: expected int, found '64'"),
        (everywhere(bits=3.5), "bits: expected int, found 3.5"),
        (everywhere(bits=8.0), "bits: expected int, found 8.0"),
        (everywhere(bits=True), "bits: expected int, found True"),
        (everywhere(mode=5), "mode: expected str, found 5"),
        (everywhere(mode=[]), "mode: expected str"),
        (lambda c: c.update(trellis=[]), "trellis: expected an object, found list"),
        (lambda c: c["trellis"].update(modules=[]), "trellis modules: expected an object, found list"),
        (lambda c: c["trellis"].pop("modules"), "trellis modules: expected an object, found NoneType"),
        (lambda c: c["trellis"].update(format_version=True), "trellis format_version: expected 1 or 2, found True"),
        (lambda c: c["trellis"]["modules"].update({UP_PROJ: 7}), f"entry of {UP_PROJ}: .*found int"),
        (lambda c: c["trellis"]["modules"].update(x=c["trellis"]["modules"][UP_PROJ]), "trellis names x, which is no"),
        (trellis(window=12.0), "window: expected int, found 12.0"),
        (trellis(k=True), "k: expected int, found True"),
        (trellis(code=1), "code: expected str, found 1"),
        (trellis(rows="128"), "rows: expected int, found '128'"),
        (trellis(axis=0), r"trellis serves .* as \[64, 128\], the manifest says \[128, 64\]"),
        (lambda c: c.update(quantization="\ud800"), "quantization: expected an object"),
    ],
)
def test_values_of_another_type(artifact: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    config = json.loads((artifact / "config.json").read_bytes())
    change(config)
    write_file(artifact, "config.json", json.dumps(config).encode())
    report = verify_artifact(artifact, depth="none")
    assert "cannot be checked" not in str(report.checks)
    with pytest.raises(ArtifactError, match=message):
        report.require()


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(format_version=True), "format_version True, this tqtool reads 1"),
        (lambda body: body.update(format_version=1.0), "format_version 1.0, this tqtool reads 1"),
        (lambda body: body["totals"].update(bits_per_weight=float("nan")), "is not JSON: it holds NaN"),
        (lambda body: body["request"].update(k=float("inf")), "is not JSON: it holds Infinity"),
        (lambda body: body["request"].update(k="\ud800"), "a value that a manifest cannot hold"),
        (lambda body: body.update(kind="\ud800"), "a value that a manifest cannot hold"),
        (
            lambda body: body["request"].update(k=json.loads("[" * 500 + "]" * 500)),
            "a value that a manifest cannot hold",
        ),
    ],
)
def test_manifests_of_another_type(artifact: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    body = json.loads((artifact / MANIFEST_NAME).read_bytes())
    change(body)
    body.pop("digest")
    data = json.dumps({**body, "digest": hashlib.sha256(text(body)).hexdigest()}).encode()
    (artifact / MANIFEST_NAME).write_bytes(data)
    assert message in first_problem(artifact)


@pytest.mark.parametrize("name", ["config.json", MANIFEST_NAME, INDEX])
@pytest.mark.parametrize("data", [DEEP, b'{"a": ' + DEEP + b"}", b"[]", b"null", b"", b"\xff", b"{", b"1" * 5000])
def test_files_that_hold_no_object(artifact: Path, name: str, data: bytes) -> None:
    if name == MANIFEST_NAME:
        (artifact / name).write_bytes(data)
    else:
        write_file(artifact, name, data)
    problem = first_problem(artifact)
    assert name in problem
    assert "is not JSON" in problem or "expected an object" in problem


@pytest.mark.parametrize("name", ["config.json", MANIFEST_NAME, INDEX, "model.safetensors", "model-x.safetensors"])
def test_folders_in_the_place_of_files(
    artifact: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (artifact / name).unlink(missing_ok=True)
    (artifact / name).mkdir()
    answer = run(capsys, monkeypatch, "verify", artifact, "--check", "none")
    assert answer.code == 4
    assert "expected a file, found a folder" in answer.out + answer.err


def test_a_crash_in_one_check_is_that_checks_failure(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*arguments: object) -> None:
        raise KeyError("what nobody\nforesaw \ud800")

    monkeypatch.setattr(verify, "config_problems", crash)
    monkeypatch.setattr(verify, "reload_stock", crash)
    report = verify_artifact(artifact)
    status = {check.name: check.status for check in report.checks}
    assert status == {
        "manifest": "pass",
        "files": "pass",
        "tensors": "pass",
        "config": "fail",
        "decode": "skip",
        "reload": "fail",
    }
    problems = [check.problems[0] for check in report.checks if check.status == "fail"]
    assert [problem.partition(": ")[0] for problem in problems] == ["cannot be checked"] * 2, problems
    monkeypatch.undo()
    monkeypatch.setattr(verify, "open_artifact", crash)
    assert verify_artifact(artifact).checks[2].name == "open"
