"""config.json of an artifact, stop tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tqtool.artifact.config import build_config, encode_config
from tqtool.artifact.stop_tokens import generation_config_bytes, read_stop_tokens
from tqtool.formats.dtypes import DType

Q4 = {"group_size": 64, "bits": 4, "mode": "affine"}
Q8 = {"group_size": 32, "bits": 8, "mode": "affine"}


def test_every_module_is_listed_and_both_sections_are_equal() -> None:
    config = build_config({"b": 1, "a": 2}, entries={"m.q": Q4, "m.dense": False, "m.trellis": None})
    assert config["quantization"] == {**Q4, "m.q": Q4, "m.dense": False}
    assert config["quantization_config"] == config["quantization"]
    assert list(config) == sorted(config)


def test_top_level_is_the_most_used_entry_unless_given() -> None:
    entries: dict[str, Any] = {"a": Q8, "b": Q4, "c": Q4}
    assert {key: build_config({}, entries=entries)["quantization"][key] for key in Q4} == Q4
    assert {key: build_config({}, entries=entries, default=Q8)["quantization"][key] for key in Q8} == Q8


def test_dense_model_has_no_quantization() -> None:
    config = build_config({"x": 1, "_name_or_path": "p"}, entries={"a": False, "b": False})
    assert config == {"x": 1}


def test_extra_keys_and_leftovers() -> None:
    config = build_config({"quantization": {"bits": 2}}, entries={"a": None}, extra={"trellis": {"v": 1}})
    assert config == {"trellis": {"v": 1}}


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_dtype_is_written_where_the_source_had_it(key: str) -> None:
    base = {key: "bfloat16", "text_config": {key: "bfloat16", "x": 1}}
    config = build_config(base, entries={}, dtype=DType.F16)
    assert config == {key: "float16", "text_config": {key: "float16", "x": 1}}
    assert base["text_config"] == {key: "bfloat16", "x": 1}
    assert build_config({}, entries={}, dtype=DType.F32) == {"torch_dtype": "float32"}


def test_non_finite_numbers_stay_json() -> None:
    data = encode_config({"a": [math.inf, {"b": -math.inf}], "c": math.nan, "d": 1.5})
    assert json.loads(data) == {
        "a": [{"__float__": "Infinity"}, {"b": {"__float__": "-Infinity"}}],
        "c": {"__float__": "NaN"},
        "d": 1.5,
    }


def write(folder: Path, **files: Any) -> list[Path]:
    paths = []
    for name, value in files.items():
        path = folder / f"{name}.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        paths.append(path)
    return paths


def test_agreeing_stop_tokens_change_nothing(tmp_path: Path) -> None:
    files = write(
        tmp_path,
        generation_config={"eos_token_id": [2]},
        tokenizer_config={"eos_token": {"content": "</s>"}, "added_tokens_decoder": {"2": {"content": "</s>"}}},
    )
    stop = read_stop_tokens({"eos_token_id": 2}, files)
    assert (stop.union, stop.note) == ((2,), None)
    assert generation_config_bytes(files, stop) is None


def test_a_missing_stop_token_is_added_to_the_generation_config(tmp_path: Path) -> None:
    files = write(
        tmp_path,
        generation_config={"eos_token_id": 7, "top_p": 0.9},
        tokenizer_config={"eos_token": "<|end|>"},
        tokenizer={"added_tokens": [{"id": 9, "content": "<|end|>"}], "model": {"vocab": {}}},
    )
    stop = read_stop_tokens({"eos_token_id": [7, 8]}, files)
    assert stop.union == (7, 8, 9)
    assert "tokenizer [9]" in (stop.note or "")
    data = generation_config_bytes(files, stop)
    assert data is not None
    assert json.loads(data) == {"eos_token_id": [7, 8, 9], "top_p": 0.9}


def test_stop_tokens_of_a_nested_config_and_broken_files(tmp_path: Path) -> None:
    files = write(tmp_path, generation_config="{", tokenizer_config={"eos_token": "x"}, tokenizer='{"added_tokens": [')
    stop = read_stop_tokens({"text_config": {"eos_token_id": 5}}, files)
    assert (stop.config, stop.generation, stop.tokenizer) == ((5,), (), ())
    assert read_stop_tokens({"eos_token_id": None}, []).union == ()
