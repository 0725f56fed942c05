"""``tqtool trellis`` from the shell to the runtime: the three forms of one artifact, rules, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.command import run
from tests.support.tensors import all_files, raw_tensors
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.formats.trellis import specs_from_config
from tqtool.native import trellis_expand

TINY = Tiny(hidden=192, intermediate=320, heads=3, kv_heads=1, head_dim=64, layers=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("source") / "tiny", TINY)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def expanded(folder: Path) -> dict[str, np.ndarray]:
    """bf16 bit patterns of every trellis weight of a packed artifact, ``[out, in]``."""
    raw, found = raw_tensors(folder), {}
    for module, spec in specs_from_config(config_of(folder)).items():
        words = np.frombuffer(raw[f"{module}.weight"][2], "<u4")
        scales = np.frombuffer(raw[f"{module}.scales"][2], np.float16)
        value = trellis_expand(words, scales, spec)
        bits = (value if spec.axis == 1 else value.T).astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to bf16, half to even, in the test's own words
        found[module] = rounded.astype(np.uint16)
    return found


def test_three_forms_hold_the_same_values(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for form in ("", "--fake-quant", "--carrier"):
        flags = [form] if form else []
        out = tmp_path / (form.strip("-") or "packed")
        answer = run(capsys, monkeypatch, "trellis", source, out, "--k", 3, "--modules", "all", *flags)
        assert answer.code == 0, answer.err
        assert run(capsys, monkeypatch, "verify", out).code == 0
    packed, fake, carrier = tmp_path / "packed", tmp_path / "fake-quant", tmp_path / "carrier"

    weights = expanded(packed)
    assert len(weights) == 7 * TINY.layers
    twin = raw_tensors(fake)
    for module, bits in weights.items():
        assert twin[f"{module}.weight"][:2] == ("BF16", bits.shape)
        assert twin[f"{module}.weight"][2] == bits.tobytes(), module
    # Everything else is the same in all three.
    raw = {folder: raw_tensors(folder) for folder in (packed, fake, carrier)}
    others = [name for name in raw[packed] if name.rpartition(".")[0] not in weights]
    assert others
    for name in others:
        assert raw[packed][name] == raw[fake][name] == raw[carrier][name]
    assert "model_file" in config_of(packed)
    assert "trellis" not in config_of(fake)
    assert all(config_of(fake)["quantization"][module] is False for module in weights)
    assert all(config_of(carrier)["quantization"][module]["bits"] == 8 for module in weights)
    assert not set(weights) & set(config_of(packed)["quantization"])


def test_packed_runs_as_its_twin_does(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packed kernels serve f32(code)·f32(scale), the twin that number in bf16: logits agree to bf16 rounding."""
    import mlx.core as mx

    from tqtool.runtime.load import load

    logits = {}
    for form, flags in (("packed", []), ("fake", ["--fake-quant"])):
        out = tmp_path / form
        assert run(capsys, monkeypatch, "trellis", source, out, "--k", 2, "--check", "none", *flags).code == 0
        for compute in ("packed", "expand"):
            model = load(out, compute=compute).model
            logits[form, compute] = np.array(model(mx.array([[1, 5, 9, 17]])))
    spread = logits["fake", "expand"].std()
    assert np.abs(logits["packed", "packed"] - logits["packed", "expand"]).max() < 1e-4 * spread
    # bf16 keeps 8 bits: relative 2^-9 per weight, independent over 192 or 320 inputs and two layers.
    assert np.abs(logits["packed", "expand"] - logits["fake", "expand"]).max() < 2**-5 * spread
    assert np.abs(logits["packed", "expand"] - logits["fake", "expand"]).max() > 0


def test_the_same_request_gives_the_same_bytes(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, threads in (("a", 1), ("b", 2)):
        arguments = ("trellis", source, tmp_path / name / "out", "--k", 2, "--threads", threads, "--check", "none")
        (tmp_path / name).mkdir()
        assert run(capsys, monkeypatch, *arguments).code == 0
    assert all_files(tmp_path / "a" / "out") == all_files(tmp_path / "b" / "out")


def test_modules_rules_and_axes(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = run(
        capsys, monkeypatch, "trellis", source, tmp_path / "o", "--dry-run", "--json", "--modules", "mlp", "--modules",
        "*.q_proj", "--rule", "*.0.mlp.up_proj=bits:8,group:32", "--down-axis", "in", "--bits", 5,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert not (tmp_path / "o").exists()
    labels = {row["module"]: row["quantizer"] for row in json.loads(answer.out)["rows"] if row["module"]}
    assert labels["model.layers.0.mlp.up_proj"] == "affine8 g32"
    assert labels["model.layers.1.mlp.up_proj"] == "trellis k3 mul1 axis1"
    assert labels["model.layers.1.mlp.down_proj"] == "trellis k3 mul1 axis1"
    assert labels["model.layers.1.self_attn.q_proj"] == "trellis k3 mul1 axis1"
    assert labels["model.layers.1.self_attn.k_proj"] == "affine5 g64"
    assert labels["lm_head"] == "affine5 g64"


def test_an_embedding_that_is_only_looked_up_gets_four_bits(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotation unties the head: the table that is only looked up then gets 4 bits, unless something was asked for."""
    for arguments, embedding, head in (
        ([], "affine4 g64", "affine6 g64"),
        (["--bits", "5"], "affine5 g64", "affine5 g64"),
        (["--rule", "model.embed_tokens=bits:8"], "affine8 g64", "affine6 g64"),
        (["--no-rotate-weights"], "affine6 g64", None),
    ):
        answer = run(capsys, monkeypatch, "trellis", source, tmp_path / "o", "--dry-run", "--json", *arguments)
        labels = {row["module"]: row["quantizer"] for row in json.loads(answer.out)["rows"] if row["module"]}
        assert (labels["model.embed_tokens"], labels.get("lm_head")) == (embedding, head)


def test_biases_stay_beside_coded_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tqtool.runtime.load import load

    source = write_tiny(tmp_path / "qwen", Tiny(model_type="qwen2"))
    answer = run(capsys, monkeypatch, "trellis", source, tmp_path / "out", "--k", 4, "--modules", "all")
    assert answer.code == 0, answer.err
    layer = load(tmp_path / "out", compute="packed").model.model.layers[0].self_attn.q_proj
    assert "bias" in layer
    raw = raw_tensors(tmp_path / "out")
    assert raw["model.layers.0.self_attn.q_proj.bias"][0] == "BF16"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--k", "5"], "k=5"),
        (["--modules", "*.w1"], "matches no linear layer"),
        (["--modules", "model.embed_tokens"], "matches no linear layer"),
        (["--modules", "mlp", "--rule", "*.mlp.*=bits:4"], "take every module"),
        (["--code", "random"], "needs a table"),
        (["--code", "hyb"], "'hyb' is unknown"),
        (["--window", "13"], "window 13"),
        (["--warmup", "0"], "--warmup 0"),
        (["--down-axis", "up"], "--down-axis 'up'"),
        (["--fake-quant", "--carrier"], "two forms"),
        (["--no-rotate-weights", "--rotation-seed", "3"], "does nothing"),
        (["--rule", "nothing*=bits:4"], "matches no module"),
    ],
)
def test_bad_requests_cost_nothing(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    text: str,
) -> None:
    answer = run(capsys, monkeypatch, "trellis", source, tmp_path / "out", *arguments)
    assert answer.code == 2
    assert answer.err.startswith("error: ")
    assert text in answer.err
    assert "Traceback" not in answer.err
    assert list(tmp_path.iterdir()) == []
