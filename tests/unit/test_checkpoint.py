"""Opening a folder: every way it can be wrong has its own message; reading is exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.tiny_models import Tiny, write_tiny, write_weights
from tqtool.errors import SourceError
from tqtool.formats.dtypes import DType
from tqtool.source.checkpoint import open_checkpoint

INDEX = "model.safetensors.index.json"


def sharded(folder: Path) -> Path:
    return write_tiny(folder / "model", Tiny(shards=3))


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("shards", [1, 3])
def test_opens_and_reads_what_was_written(tmp_path: Path, shards: int) -> None:
    tiny = Tiny(shards=shards)
    checkpoint = open_checkpoint(str(write_tiny(tmp_path / "model", tiny)))
    tensors = tiny.tensors()
    assert checkpoint.shapes() == {name: array.shape for name, array in tensors.items()}
    for name, array in tensors.items():
        read = checkpoint.tensors[name].read()
        assert read.dtype == array.dtype
        assert read.tobytes() == array.tobytes()
        assert read.flags.owndata or read.base.flags.owndata
        assert read.flags.writeable
    assert checkpoint.model_type == "llama"
    assert checkpoint.origin.kind == "folder"
    assert checkpoint.warnings == ()
    assert checkpoint.nbytes == sum(array.nbytes for array in tensors.values())


def test_companions_are_everything_but_weights_config_and_index(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    for name in ("modeling_x.py", "preprocessor_config.json", "README.md", "training.log", ".hidden.json", "NOTICE"):
        (folder / name).write_text("x")
    names = [path.name for path in open_checkpoint(str(folder)).files]
    assert names == [
        "LICENSE",
        "NOTICE",
        "chat_template.jinja",
        "generation_config.json",
        "modeling_x.py",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_rows_are_those_of_the_whole(tmp_path: Path, dtype: Any) -> None:
    array = np.random.default_rng(0).standard_normal((7, 3, 5)).astype(dtype)
    folder = write_tiny(tmp_path / "model")
    write_weights(folder, {"x": array, "s": np.array(3.5, dtype), "v": array[:, 0, 0].copy()})
    tensors = open_checkpoint(str(folder)).tensors
    for start, stop in ((0, 7), (2, 5), (6, 7), (3, 3)):
        assert tensors["x"].read_rows(start, stop).tobytes() == array[start:stop].tobytes()
        assert tensors["x"].read_rows(start, stop).shape == (stop - start, 3, 5)
    assert tensors["v"].read_rows(1, 3).tobytes() == array[1:3, 0, 0].tobytes()
    assert tensors["s"].read().shape == ()
    for start, stop in ((0, 8), (-1, 2), (3, 2)):
        with pytest.raises(IndexError, match="rows"):
            tensors["x"].read_rows(start, stop)
    with pytest.raises(IndexError, match="shape"):
        tensors["s"].read_rows(0, 1)


def _remove_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def _truncate_shard(folder: Path) -> None:
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _stale_shard(folder: Path) -> None:
    save_file({"old.weight": np.zeros(3, np.float32)}, folder / "model-00004-of-00004.safetensors")


def _stale_single(folder: Path) -> None:
    save_file({"old.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")


def _index_names_unknown_tensor(folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"ghost": "model-00001-of-00003.safetensors"}))


def _index_forgets_tensor(folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop("model.norm.weight"))


def _index_places_wrongly(folder: Path) -> None:
    def swap(index: dict[str, Any]) -> None:
        here = index["weight_map"]["model.norm.weight"]
        other = next(name for name in sorted(set(index["weight_map"].values())) if name != here)
        index["weight_map"]["model.norm.weight"] = other

    edit_json(folder / INDEX, swap)


def _twice(folder: Path) -> None:
    extra = {"model.norm.weight": np.ones(128, np.float32)}
    path = folder / "model-00001-of-00003.safetensors"
    from safetensors.numpy import load_file

    held = load_file(path)
    target = path if "model.norm.weight" not in held else folder / "model-00002-of-00003.safetensors"
    save_file({**load_file(target), **extra}, target)


def _index_is_empty(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {}}')


def _index_is_broken(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": ')


def _index_leaves_folder(folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"x": "../other.safetensors"}))


def _index_other_pattern(folder: Path) -> None:
    (folder / "model-00001-of-00003.safetensors").rename(folder / "part1.safetensors")
    text = (folder / INDEX).read_text().replace("model-00001-of-00003", "part1")
    (folder / INDEX).write_text(text)


def _no_index_one_missing(folder: Path) -> None:
    (folder / INDEX).unlink()
    _remove_shard(folder)


def _no_index_single_beside(folder: Path) -> None:
    (folder / INDEX).unlink()
    _stale_single(folder)


def _no_index_two_sets(folder: Path) -> None:
    (folder / INDEX).unlink()
    _stale_shard(folder)


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{model_type: llama}")


def _config_list(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def _no_model_type(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.pop("model_type"))


def _declared_mlx(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(quantization={"bits": 4, "group_size": 64, "mode": "affine"}))


def _declared_gptq(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(quantization_config={"quant_method": "gptq"}))


def _declared_nested(folder: Path) -> None:
    nested = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    edit_json(folder / "config.json", lambda config: config.update(text_config=nested))


def _declared_trellis(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(trellis={"format_version": 1, "modules": {}}))


def _declared_nvidia(folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text("{}")


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing shard": (_remove_shard, r"names model-00002-of-00003.safetensors, not on disk \(2 of 3 shards present\)"),
    "truncated shard": (_truncate_shard, r"model-00002-of-00003.safetensors: truncated"),
    "stale shard": (_stale_shard, r"model-00004-of-00004.safetensors on disk but not in"),
    "stale single file": (_stale_single, r"model.safetensors on disk but not in"),
    "index names unknown tensor": (_index_names_unknown_tensor, r"'ghost' in model-00001.*does not hold it"),
    "index forgets tensor": (_index_forgets_tensor, r"holds tensor 'model.norm.weight', which .* does not list"),
    "index places wrongly": (_index_places_wrongly, r"places tensor 'model.norm.weight' in .*, found in"),
    "tensor twice": (_twice, r"'model.norm.weight' is in both model-0000\d.* and model-0000\d"),
    "empty index": (_index_is_empty, "expected a non-empty object 'weight_map'"),
    "broken index": (_index_is_broken, "not a readable JSON file"),
    "index leaves folder": (_index_leaves_folder, "must map to a .safetensors file of the same folder"),
    "index with other names": (_index_other_pattern, "expected names that match"),
    "no index, one missing": (_no_index_one_missing, "shard 2 of 3 is missing, and there is no"),
    "no index, single beside shards": (_no_index_single_beside, "lies beside model-00001-of-00003.safetensors"),
    "no index, two sets": (_no_index_two_sets, r"shards of different sets \(of \[3, 4\]\)"),
    "no config": (_no_config, "config.json is missing"),
    "broken config": (_broken_config, "config.json: not JSON"),
    "config is a list": (_config_list, "expected a JSON object, found list"),
    "no model_type": (_no_model_type, "'model_type' must be a non-empty string, found None"),
    "mlx quantization": (_declared_mlx, r"already quantized: config.json has quantization \(affine\)"),
    "gptq": (_declared_gptq, r"already quantized: config.json has quantization_config \(gptq\)"),
    "nested fp8": (_declared_nested, r"already quantized: config.json has quantization_config \(fp8\)"),
    "our own trellis": (_declared_trellis, "already quantized: config.json has trellis"),
    "modelopt": (_declared_nvidia, "hf_quant_config.json is present"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_message(tmp_path: Path, fault: str) -> None:
    damage, message = FAULTS[fault]
    folder = sharded(tmp_path)
    damage(folder)
    with pytest.raises(SourceError, match=message) as caught:
        open_checkpoint(str(folder))
    assert "model" in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("model.x.scales", np.ones(2, np.float32), r"tensor 'model.x.scales'"),
        ("model.x.qweight", np.ones(2, np.int32), r"tensor 'model.x.qweight'"),
        ("model.x.weight_scale", np.ones(2, np.float32), r"tensor 'model.x.weight_scale'"),
        ("model.x.weight", np.ones(2, np.int8), r"tensor 'model.x.weight' is I8"),
        ("model.x.weight", np.ones(2, ml_dtypes.float8_e4m3fn), r"tensor 'model.x.weight' is F8_E4M3"),
        ("model.x.inner", np.ones(2, ml_dtypes.float8_e5m2), r"tensor 'model.x.inner' is F8_E5M2"),
    ],
)
def test_quantized_tensors_are_recognized(tmp_path: Path, name: str, array: Any, message: str) -> None:
    folder = write_tiny(tmp_path / "model")
    write_weights(folder, {name: array})
    with pytest.raises(SourceError, match=message):
        open_checkpoint(str(folder))
    assert open_checkpoint(str(folder), allow_quantized=True).tensors[name].shape == (2,)


def test_integer_buffers_are_not_quantization(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model")
    write_weights(folder, {**Tiny().tensors(), "model.position_ids": np.arange(4)})
    assert open_checkpoint(str(folder)).tensors["model.position_ids"].dtype is DType.I64


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        ({}, "the folder is empty", None),
        ({"a.gguf": b"GGUF"}, r"only GGUF weights found \(a.gguf\)", "import-gguf"),
        ({"pytorch_model.bin": b"x"}, "only PyTorch pickles found", "safetensors"),
        ({"adapter_model.safetensors": b"x", "adapter_config.json": b"{}"}, "a LoRA adapter", "fuse"),
        ({"weights.safetensors": b"x"}, "found weights.safetensors, expected names that match", "rename"),
        ({"README.md": b"x"}, "no weights; expected", "download"),
    ],
)
def test_folders_without_weights(tmp_path: Path, files: dict[str, bytes], message: str, hint: str | None) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=message) as caught:
        open_checkpoint(str(tmp_path))
    assert hint is None or hint in (caught.value.hint or "")


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(SourceError, match="a GGUF file, expected a model folder") as caught:
        open_checkpoint(str(gguf))
    assert f"import-gguf {gguf}" in (caught.value.hint or "")
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"x")
    with pytest.raises(SourceError, match="a file, expected a model folder") as caught:
        open_checkpoint(str(other))
    assert str(tmp_path) in (caught.value.hint or "")


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such folder, and not a hub id"):
        open_checkpoint(str(tmp_path / "nothing"))


def test_revision_of_a_local_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="--revision main is for hub ids"):
        open_checkpoint(str(write_tiny(tmp_path / "model")), revision="main")


def test_unknown_architecture_and_missing_tokenizer_are_warnings(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", tokenizer=False)
    edit_json(folder / "config.json", lambda config: config.update(model_type="nonesuch"))
    checkpoint = open_checkpoint(str(folder))
    assert [w.split(": ")[-1] for w in checkpoint.warnings] == [
        "model_type 'nonesuch' is not an architecture the installed mlx-lm knows",
        "no tokenizer (none of tokenizer.json, tokenizer.model, vocab.json, vocab.txt)",
    ]


def test_aliases_are_known_architectures(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", Tiny(model_type="mistral"))
    assert open_checkpoint(str(folder)).warnings == ()


def test_content_hash_follows_layout_and_config(tmp_path: Path) -> None:
    first = open_checkpoint(str(write_tiny(tmp_path / "a"))).content_hash()
    assert open_checkpoint(str(write_tiny(tmp_path / "b"))).content_hash() == first
    assert open_checkpoint(str(write_tiny(tmp_path / "c", Tiny(vocab=321)))).content_hash() != first
    edit_json(tmp_path / "b" / "config.json", lambda config: config.update(rms_norm_eps=1e-6))
    assert open_checkpoint(str(tmp_path / "b")).content_hash() != first


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model")
    checkpoint = open_checkpoint(str(folder))
    last = max(checkpoint.tensors.values(), key=lambda ref: ref.end)
    last.path.write_bytes(last.path.read_bytes()[:-10])
    with pytest.raises(SourceError, match=f"ends inside tensor '{last.name}'"):
        last.read()
    last.path.unlink()
    with pytest.raises(SourceError, match="cannot be read"):
        last.read()
