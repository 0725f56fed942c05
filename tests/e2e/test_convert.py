"""``convert`` end to end on tiny checkpoints: bytes, files, provenance, refusals."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from tests.support.conversions import Q4, convert, plan
from tests.support.tensors import all_files, raw_tensors
from tests.support.tiny_models import Tiny, write_tiny, write_weights
from tqtool.artifact.verify import verify_artifact
from tqtool.errors import ArtifactError, NumericalError, UserError
from tqtool.formats.dtypes import DType
from tqtool.pipeline import preflight
from tqtool.pipeline.rules import Packed
from tqtool.solve import rtn
from tqtool.solve.quantizer import QuantResult
from tqtool.solve.rtn import AffineRtn


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "source")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_bytes())


def test_tensors_are_those_of_mlx_quantize(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    found = raw_tensors(tmp_path / "out")
    for name, array in Tiny().tensors().items():
        if array.ndim == 1:
            assert found.pop(name) == ("BF16", array.shape, array.tobytes())
            continue
        parts = mx.quantize(mx.array(array), group_size=64, bits=4, stream=mx.cpu)
        for suffix, part in zip(("weight", "scales", "biases"), parts, strict=True):
            raw = found.pop(name.removesuffix("weight") + suffix)
            assert raw[2] == np.array(part.view(mx.uint8)).tobytes(), name
    assert found == {}


def test_same_bytes_whatever_the_output_name_shards_of_work_and_threads(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "a", rotation_seed=42, rules=("*down_proj=bits:3,group:32",))
    monkeypatch.setattr(rtn, "CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(rtn, "MAX_STREAMS", 1)
    convert(source, tmp_path / "b", rotation_seed=42, rules=("*down_proj=bits:3,group:32",))
    first, second = all_files(tmp_path / "a"), all_files(tmp_path / "b")
    assert first == second
    assert {"README.md", "optiq_metadata.json", "tqtool/manifest.json", "config.json"} <= set(first)


def test_source_shards_do_not_change_tensors(source: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "sharded", Tiny(shards=3))
    convert(source, tmp_path / "a")
    convert(tmp_path / "sharded", tmp_path / "b")
    assert raw_tensors(tmp_path / "a") == raw_tensors(tmp_path / "b")


def test_every_module_has_its_entry(source: Path, tmp_path: Path) -> None:
    rules = ("*q_proj=bits:8,group:32", "model.layers.1.*=mode:mxfp8", "*v_proj=float")
    convert(source, tmp_path / "out", rules=rules)
    quantization = config_of(tmp_path / "out")["quantization"]
    assert {key: quantization[key] for key in ("bits", "group_size", "mode")} == {
        "bits": 4,
        "group_size": 64,
        "mode": "affine",
    }
    modules = {name.removesuffix(".weight") for name, array in Tiny().tensors().items() if array.ndim == 2}
    assert set(quantization) - {"bits", "group_size", "mode"} == modules
    assert quantization["model.layers.0.self_attn.q_proj"] == {"bits": 8, "group_size": 32, "mode": "affine"}
    assert quantization["model.layers.1.mlp.up_proj"] == {"bits": 8, "group_size": 32, "mode": "mxfp8"}
    assert quantization["model.layers.1.self_attn.v_proj"] is False
    assert verify_artifact(tmp_path / "out", depth="none").is_good


def test_dense_copy_keeps_every_byte(source: Path, tmp_path: Path) -> None:
    result = convert(source, tmp_path / "out", packing=None)
    assert raw_tensors(tmp_path / "out") == raw_tensors(source)
    assert "quantization" not in config_of(tmp_path / "out")
    assert result.manifest.kind == "float"
    assert result.plan.totals.bits_per_weight == 16.0


@pytest.mark.parametrize(("dtype", "numpy"), [(DType.F16, np.float16), (DType.F32, np.float32)])
def test_dtype_casts_dense_values_and_scales(source: Path, tmp_path: Path, dtype: DType, numpy: type) -> None:
    convert(source, tmp_path / "dense", packing=None, dtype=dtype)
    for name, array in Tiny().tensors().items():
        raw = raw_tensors(tmp_path / "dense")[name]
        assert raw == (dtype.value, array.shape, array.astype(numpy).tobytes())
    assert config_of(tmp_path / "dense")["torch_dtype"] == {"F16": "float16", "F32": "float32"}[dtype.value]
    convert(source, tmp_path / "packed", dtype=dtype)
    packed = raw_tensors(tmp_path / "packed")
    assert packed["model.embed_tokens.scales"][0] == dtype.value
    assert packed["model.norm.weight"][0] == dtype.value


def test_declared_dtype_wins_over_the_stored_one(tmp_path: Path) -> None:
    """As in mlx-lm: float32 tensors under a bfloat16 config are cast, and the manifest says so."""
    source = write_tiny(tmp_path / "source", Tiny(dtype="float32"))
    config = config_of(source) | {"torch_dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    result = convert(source, tmp_path / "out", packing=None)
    expected = Tiny(dtype="float32").tensors()["model.norm.weight"].astype(ml_dtypes.bfloat16)
    assert raw_tensors(tmp_path / "out")["model.norm.weight"][2] == expected.tobytes()
    assert result.manifest.notes == ["dense values and scales stored as bf16; the source also holds F32"]


def test_rotation_unties_and_is_recorded_once_more_when_converted_again(source: Path, tmp_path: Path) -> None:
    folded = convert(source, tmp_path / "folded", packing=None, rotation_seed=7)
    assert config_of(tmp_path / "folded")["tie_word_embeddings"] is False
    assert "lm_head.weight" in raw_tensors(tmp_path / "folded")
    assert [(t.id, t.seed) for t in folded.manifest.transforms] == [("rotation.llama", 7)]
    assert folded.plan.totals.source_parameters < folded.plan.totals.parameters
    again = convert(tmp_path / "folded", tmp_path / "packed")
    assert [(t.id, t.seed) for t in again.manifest.transforms] == [("rotation.llama", 7)]
    transforms = json.loads((tmp_path / "packed" / "optiq_metadata.json").read_bytes())["weight_transforms"]
    assert transforms[0]["id"] == "rotation.llama"
    assert transforms[0]["family"] == "llama"
    assert transforms[0]["seed"] == 7
    assert any(text.startswith("no-r4") for text in transforms[0]["deviations"])


def test_fold_then_pack_equals_both_at_once(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "folded", packing=None, rotation_seed=42)
    convert(tmp_path / "folded", tmp_path / "two")
    convert(source, tmp_path / "one", rotation_seed=42)
    assert raw_tensors(tmp_path / "two") == raw_tensors(tmp_path / "one")


def test_companions_are_copied_verbatim(source: Path, tmp_path: Path) -> None:
    (source / "preprocessor_config.json").write_text('{"size": 3}')
    (source / "NOTICE.txt").write_text("notice")
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n# The source\n")
    convert(source, tmp_path / "out")
    before, after = all_files(source), all_files(tmp_path / "out")
    for name in set(before) - {"config.json", "model.safetensors", "README.md"}:
        assert after[name] == before[name], name
    assert b"license: apache-2.0" in after["README.md"]
    assert b"The source" not in after["README.md"]


def test_disagreeing_stop_tokens_are_united(source: Path, tmp_path: Path) -> None:
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    result = convert(source, tmp_path / "out")
    assert config_of(tmp_path / "out")["eos_token_id"] == [5, 2]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_bytes())["eos_token_id"] == [5, 2]
    assert "stop tokens differ" in result.manifest.notes[0]


def test_manifest_accounts_for_every_byte(source: Path, tmp_path: Path) -> None:
    result = convert(source, tmp_path / "out")
    files = all_files(tmp_path / "out")
    assert set(result.manifest.files) == set(files) - {"tqtool/manifest.json"}
    totals, raw = result.manifest.totals, raw_tensors(tmp_path / "out")
    size = sum(len(data) for _, _, data in raw.values())
    parameters = sum(array.size for array in Tiny().tensors().values())
    assert (totals.tensor_bytes, totals.parameters) == (size, parameters)
    assert totals.bits_per_weight == pytest.approx(8 * size / parameters, rel=1e-12)
    codes = sum(len(data) for name, (_, _, data) in raw.items() if name.endswith("weight"))
    assert totals.code_bits_per_weight == pytest.approx(8 * codes / parameters, rel=1e-12)
    assert b"source" in files["tqtool/manifest.json"]
    assert str(tmp_path).encode() not in b"".join(files.values())


@pytest.mark.parametrize("options", [{}, {"rotation_seed": 42}, {"packing": None}])
def test_manifest_has_the_hash_of_every_source_tensor(source: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    manifest = convert(source, tmp_path / "out", **options).manifest
    arrays = Tiny().tensors()
    for record in manifest.tensors:
        assert record.source_sha256 == hashlib.sha256(arrays[record.source].tobytes()).hexdigest(), record.name


def test_manifest_notices_other_values_in_the_same_layout(source: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", Tiny(seed=1))
    first = convert(source, tmp_path / "a").manifest.source
    second = convert(other, tmp_path / "b").manifest.source
    assert first.content_sha256 != second.content_sha256


def test_dense_fallback_is_a_row_with_its_reason(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", Tiny(intermediate=288))
    result = convert(source, tmp_path / "out", packing=Packed(bits=4, group_size=64, mode="affine"))
    rows = {record.name: record for record in result.manifest.tensors}
    note = "kept dense: input dimension 288 is not divisible by group size 64"
    assert rows["model.layers.0.mlp.down_proj.weight"].notes == [note]
    assert config_of(tmp_path / "out")["quantization"]["model.layers.0.mlp.down_proj"] is False


def test_nan_in_the_source(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source")
    tensors = Tiny().tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][200, 3] = np.nan
    write_weights(source, tensors)
    for options in ({}, {"rotation_seed": 42}, {"packing": None}):
        with pytest.raises(NumericalError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: 1 of .* \[200, 3\]"):
            convert(source, tmp_path / "out", **options)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_infinite_gain_of_a_folded_norm(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source")
    tensors = Tiny().tensors()
    tensors["model.norm.weight"][5] = np.inf
    write_weights(source, tensors)
    with pytest.raises(NumericalError, match=r"model\.norm\.weight"):
        convert(source, tmp_path / "out", rotation_seed=42)


@pytest.mark.parametrize("place", ["", "inside", "inside/deeper"])
def test_output_in_the_source_is_refused(source: Path, place: str) -> None:
    with pytest.raises(UserError, match="the output lies in the source folder"):
        plan(source, source / place, overwrite=True)


def test_output_around_the_source_is_refused(source: Path) -> None:
    with pytest.raises(UserError, match="the output holds the source folder"):
        plan(source, source.parent, overwrite=True)


def test_non_empty_output_is_refused_before_work(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(UserError, match="is not empty"):
        plan(source, tmp_path / "out")
    assert all_files(tmp_path / "out") == {"mine": b"x"}


def test_full_disk_is_noticed_before_work(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ArtifactError, match=r"the artifact needs 1\.2 MB, 1\.0 kB are free"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_quantized_source_is_refused(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "packed")
    with pytest.raises(UserError, match="already quantized"):
        plan(tmp_path / "packed", tmp_path / "twice")


def test_interrupt_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def interrupt(amount: float, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan(source, tmp_path / "out").run(interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_failing_check_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        assert (folder / "tqtool" / "manifest.json").is_file()
        raise ArtifactError("no")

    with pytest.raises(ArtifactError, match="no"):
        plan(source, tmp_path / "out").run(check=refuse)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_quantizer_that_breaks_its_promise(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AffineRtn.run_rows

    def forgetful(self: AffineRtn, name: str, shape: tuple[int, ...], read_rows: Any) -> QuantResult:
        tensors = dict(honest(self, name, shape, read_rows).tensors)
        tensors.popitem()
        return QuantResult(tensors=tensors)

    monkeypatch.setattr(AffineRtn, "run_rows", forgetful)
    with pytest.raises(ArtifactError, match="affine4 g64 promised"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_stat_that_is_not_finite_is_caught_at_its_tensor(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = AffineRtn.run_rows

    def broken(self: AffineRtn, name: str, shape: tuple[int, ...], read_rows: Any) -> QuantResult:
        return QuantResult(tensors=honest(self, name, shape, read_rows).tensors, stats={"error": float("nan")})

    monkeypatch.setattr(AffineRtn, "run_rows", broken)
    with pytest.raises(NumericalError, match=r"model\.embed_tokens\.weight: the quantizer's error is nan"):
        convert(source, tmp_path / "out")


def test_low_bit_head_is_a_hint(source: Path, tmp_path: Path) -> None:
    assert "the tied embedding" in plan(source, tmp_path / "a").plan.hints[0]
    assert "lm_head is packed" in plan(source, tmp_path / "a", rotation_seed=1).plan.hints[0]
    assert plan(source, tmp_path / "a", rules=("model.embed_tokens=bits:8",)).plan.hints == ()
    assert plan(source, tmp_path / "a", packing=None).plan.hints == ()


def test_estimates_are_sane(source: Path, tmp_path: Path) -> None:
    totals = plan(source, tmp_path / "out").plan.totals
    convert(source, tmp_path / "out")
    written = sum(len(data) for data in all_files(tmp_path / "out").values())
    assert totals.tensor_bytes < written <= totals.disk_bytes
    assert Q4.bits < totals.bits_per_weight < 5
