"""``verify``: a good artifact passes every check; each kind of damage is red and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.conversions import convert
from tests.support.tiny_models import Tiny, write_tiny, write_weights
from tqtool.artifact import decode_check
from tqtool.artifact.config_check import config_entries
from tqtool.artifact.decode_check import decode_problems
from tqtool.artifact.reader import open_artifact
from tqtool.artifact.verify import Check, VerifyReport, verify_artifact
from tqtool.errors import ArtifactError, UserError
from tqtool.formats.manifest import MANIFEST_NAME, FileRecord, encode, parse

RULES = ("*q_proj=mode:mxfp8", "*k_proj=mode:nvfp4", "*v_proj=float", "*o_proj=bits:3,group:32")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify")
    convert(write_tiny(root / "source"), root / "artifact", rules=RULES)
    return root / "artifact"


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "artifact")


@pytest.mark.parametrize("is_listed", [False, True])
def test_code_in_an_artifact_is_never_run(artifact: Path, tmp_path: Path, is_listed: bool) -> None:
    """Also when the manifest vouches for it: whoever can write the file can write its hash."""
    (artifact / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit_config(artifact, lambda config: config.update(model_file="evil.py"))
    if is_listed:
        rehash_file(artifact, "evil.py")
    report = verify_artifact(artifact)
    assert not (tmp_path / "ran").exists()
    assert "was not executed" in failed(report)["reload"].problems[0]


def failed(report: VerifyReport) -> dict[str, Check]:
    return {check.name: check for check in report.checks if check.status == "fail"}


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 0x10
    file.write_bytes(bytes(data))


def edit_config(artifact: Path, change: Callable[[dict], None], *, rehash: bool = True) -> None:
    """Edit config.json; with ``rehash`` the manifest is made to agree, so that only later checks can notice."""
    config = json.loads((artifact / "config.json").read_bytes())
    change(config)
    (artifact / "config.json").write_text(json.dumps(config, indent=4))
    if rehash:
        rehash_file(artifact, "config.json")


def rehash_file(artifact: Path, name: str) -> None:
    import hashlib

    manifest = parse((artifact / MANIFEST_NAME).read_bytes())
    data = (artifact / name).read_bytes()
    record = FileRecord(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifest = manifest.model_copy(update={"files": {**manifest.files, name: record}})
    (artifact / MANIFEST_NAME).write_bytes(encode(manifest))


def test_good_artifact_passes_everything(artifact: Path) -> None:
    report = verify_artifact(artifact)
    assert {check.name: check.status for check in report.checks} == dict.fromkeys(
        ("manifest", "files", "tensors", "config", "decode", "reload"), "pass"
    )
    assert report.is_good
    report.require()
    assert "finite logits" in report.checks[-1].detail


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "LICENSE",
        "README.md",
        "optiq_metadata.json",
    ],
)
def test_a_flipped_byte_in_any_file(artifact: Path, name: str) -> None:
    flip(artifact / name, (artifact / name).stat().st_size // 2)
    problems = failed(verify_artifact(artifact, depth="none"))["files"].problems
    assert len(problems) == 1
    assert problems[0].startswith(f"{name}: sha256 is ")


def test_a_flipped_byte_in_a_tensor_names_the_tensor(artifact: Path) -> None:
    ref = open_artifact(artifact).tensors["model.layers.1.mlp.up_proj.scales"]
    flip(artifact / "model.safetensors", ref.begin + 3)
    found = failed(verify_artifact(artifact, depth="none"))
    assert found["files"].problems[0].startswith("model.safetensors: sha256")
    assert found["tensors"].problems[0].startswith("model.layers.1.mlp.up_proj.scales: sha256")
    with pytest.raises(ArtifactError, match=r"files: model\.safetensors: sha256") as caught:
        verify_artifact(artifact, depth="none").require()
    assert caught.value.exit_code == 4


def test_a_flipped_byte_in_a_shard_header(artifact: Path) -> None:
    flip(artifact / "model.safetensors", 40)
    report = verify_artifact(artifact, depth="none")
    assert "files" in failed(report)
    assert not report.is_good


def test_a_flipped_byte_in_the_manifest(artifact: Path) -> None:
    flip(artifact / MANIFEST_NAME, (artifact / MANIFEST_NAME).stat().st_size // 3)
    with pytest.raises(ArtifactError, match=MANIFEST_NAME):
        verify_artifact(artifact, depth="none")


def test_truncated_shard(artifact: Path) -> None:
    shard = artifact / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    report = verify_artifact(artifact)
    found = failed(report)
    assert "bytes, the manifest says" in found["files"].problems[0]
    assert "truncated" in found["open"].problems[0]
    assert {check.name for check in report.checks if check.status == "skip"} == {
        "tensors",
        "config",
        "decode",
        "reload",
    }


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "model.safetensors.index.json"])
def test_missing_file(artifact: Path, name: str) -> None:
    (artifact / name).unlink()
    found = failed(verify_artifact(artifact, depth="none"))
    assert f"{name}: is missing" in found["files"].problems


def test_stray_shard_is_called_what_it_is(artifact: Path) -> None:
    save_file({"model.norm.weight": np.ones(128, np.float32)}, artifact / "model-00002-of-00002.safetensors")
    found = failed(verify_artifact(artifact, depth="none"))
    assert found["files"].problems == (
        "model-00002-of-00002.safetensors: is not in the manifest and stock loaders would load it",
    )
    twice = "model.norm.weight: is in model-00002-of-00002.safetensors and in model.safetensors"
    assert found["open"].problems == (twice,)


def test_a_stray_shard_with_a_new_tensor(artifact: Path) -> None:
    save_file({"mtp.weight": np.ones(128, np.float32)}, artifact / "model-mtp.safetensors")
    found = failed(verify_artifact(artifact, depth="none"))
    assert found["tensors"].problems[0] == "mtp.weight: in model-mtp.safetensors, but not in the manifest"


def test_stray_text_is_red_and_what_hubs_add_is_not(artifact: Path) -> None:
    (artifact / ".cache" / "huggingface").mkdir(parents=True)
    (artifact / ".cache" / "huggingface" / "x").write_text("")
    (artifact / ".gitattributes").write_text("")
    assert verify_artifact(artifact, depth="none").is_good
    (artifact / "notes.txt").write_text("")
    assert failed(verify_artifact(artifact, depth="none"))["files"].problems == ("notes.txt: is not in the manifest",)


def test_dropped_tensor(artifact: Path) -> None:
    shard = artifact / "model.safetensors"
    data = shard.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    begin, _ = header.pop(last)["data_offsets"]
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size : 8 + size + begin])
    found = failed(verify_artifact(artifact))
    assert f"{last}: planned in model.safetensors, no shard holds it" in found["tensors"].problems
    assert "model.safetensors.index.json: its weight_map differs from the shards on disk" in found["tensors"].problems
    assert "stock mlx-lm does not load" in found["reload"].problems[0]


def packed_as(bits: int) -> Callable[[dict], None]:
    def change(config: dict) -> None:
        for key in ("quantization", "quantization_config"):
            config[key]["model.layers.0.mlp.up_proj"] = {"group_size": 64, "bits": bits, "mode": "affine"}

    return change


def test_config_with_other_bits_than_the_tensors(artifact: Path) -> None:
    edit_config(artifact, packed_as(8))
    found = failed(verify_artifact(artifact, depth="load"))
    assert "files" not in found
    assert found["config"].problems == (
        "model.layers.0.mlp.up_proj.weight: U32 [256, 16], config.json says U32 [256, 32]",
    )
    assert "reload" in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["quantization"].update(bits=3), "quantization and quantization_config differ"),
        (packed_as(7), "7 bits: affine has"),
        (
            lambda c: [c[k].update({"model.layers.0.mlp.up_proj": {"bits": 4}}) for k in QUANT],
            "expected bits, group_size and mode, found ['bits']",
        ),
        (
            lambda c: [c[k].pop("model.layers.0.mlp.up_proj") for k in QUANT],
            "quantization has no entry for model.layers.0.mlp.up_proj",
        ),
        (
            lambda c: [c[k].update({"model.layers.0.mlp.up_proj": False}) for k in QUANT],
            "U32 [256, 16], config.json says a float [256, 128]",
        ),
        (
            lambda c: [c[k].update({"model.layers.9.mlp.up_proj": False}) for k in QUANT],
            "names model.layers.9.mlp.up_proj, which is no module",
        ),
        (lambda c: [c[k].pop("mode") for k in QUANT], "quantization lacks mode"),
        (lambda c: [c.pop(k) for k in QUANT], "config.json says a float"),
        (lambda c: c.update(trellis={"format_version": 9}), "trellis format_version"),
    ],
)
def test_config_edits(artifact: Path, change: Callable[[dict], None], message: str) -> None:
    edit_config(artifact, change)
    found = failed(verify_artifact(artifact, depth="none"))
    assert "files" not in found
    assert any(message in problem for problem in found["config"].problems), found["config"].problems


QUANT = ("quantization", "quantization_config")


def test_model_that_stock_builds_differently_is_red(artifact: Path) -> None:
    """config.json and tensors agree with the manifest, but the layer count does not."""
    edit_config(artifact, lambda config: config.update(num_hidden_layers=3))
    found = failed(verify_artifact(artifact))
    assert list(found) == ["reload"]
    assert "stock mlx-lm does not load" in found["reload"].problems[0]


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    """Every weight is finite, the product with the final norm is not."""
    source = write_tiny(tmp_path / "source")
    tensors = Tiny().tensors()
    tensors["model.norm.weight"][:] = 3e38
    write_weights(source, tensors)
    convert(source, tmp_path / "out")
    assert "not finite" in failed(verify_artifact(tmp_path / "out"))["reload"].problems[0]
    assert verify_artifact(tmp_path / "out", depth="load").is_good


def test_decode_compares_the_format_with_mlx(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_artifact(artifact)
    count, problems = decode_problems(opened, config_entries(opened))
    assert (count, problems) == (15, [])
    honest = decode_check.affine.dequantize
    monkeypatch.setattr(decode_check.affine, "dequantize", lambda *parts: honest(*parts) + 1e-3)
    _, problems = decode_problems(opened, config_entries(opened))
    assert len(problems) == 3 * 13  # three rows of each packed module; v_proj is dense
    assert "mx.dequantize differs from the format by 0.001" in problems[0]


@pytest.mark.parametrize("module", ["model.layers.0.mlp.up_proj.scales", "model.layers.0.self_attn.v_proj.weight"])
def test_decode_notices_values_that_are_not_finite(artifact: Path, module: str) -> None:
    ref = open_artifact(artifact).tensors[module]
    data = bytearray((artifact / "model.safetensors").read_bytes())
    data[ref.begin : ref.begin + 2] = ml_dtypes.bfloat16(np.inf).tobytes()
    (artifact / "model.safetensors").write_bytes(bytes(data))
    opened = open_artifact(artifact)
    _, problems = decode_problems(opened, config_entries(opened))
    assert len(problems) == 1
    assert "not finite" in problems[0]


def test_folders_that_are_no_artifacts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        verify_artifact(tmp_path / "missing")
    source = write_tiny(tmp_path / "source", Tiny(layers=1))
    with pytest.raises(ArtifactError, match=r"has no tqtool/manifest\.json") as caught:
        verify_artifact(source)
    assert "written by tqtool" in (caught.value.hint or "")


def test_rotated_and_dense_artifacts_pass(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source")
    convert(source, tmp_path / "rotated", rotation_seed=42)
    assert verify_artifact(tmp_path / "rotated").is_good
    convert(source, tmp_path / "dense", packing=None)
    assert verify_artifact(tmp_path / "dense", depth="none").is_good
