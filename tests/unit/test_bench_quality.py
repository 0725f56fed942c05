"""The pure parts of ``benchmarks/bench_quality.py``: what is counted, what becomes of an arm that fails."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.conversions import Q4, convert
from tests.support.stock import stock_convert
from tests.support.tiny_models import Tiny, write_tiny

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
CONDITIONS = {
    "model": "m",
    "text": "t.txt",
    "calibration": "4 × 64 tokens from the end",
    "scored": "2 × 64 tokens from the start",
    "versions": {"mlx": "0"},
    "threads": "1",
}


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, BENCHMARKS)
    names = ("bench_quality", "quality_peers", "quality_table", "true_bits")
    yield {name: importlib.import_module(name) for name in names}
    sys.path.remove(BENCHMARKS)


def scored(name: str, linear: float, kl: float, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "how": "a|way",
        "linear_bits_per_weight": linear,
        "bits_per_weight": linear + 1,
        "weight_bytes": 2_000_000,
        "minutes": 1.25,
        "facts": {},
        "score": {
            "kl": {"mean": kl, "se_windows": 0.02, "se_tokens": 0.01},
            "top1": {"mean": 0.5},
            "ppl": 30.0,
            "teacher_ppl": 20.0,
        },
        **changes,
    }


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_bits_of_a_stock_artifact_and_of_ours(benchmarks, tmp_path, family):
    source = write_tiny(tmp_path / "source", Tiny(model_type=family))
    stock_convert([(source, tmp_path / "stock", {"quantize": True, "q_bits": 4, "q_group_size": 64})])
    convert(source, tmp_path / "ours", packing=Q4)
    weights = sum(tensor.size for tensor in Tiny(model_type=family).tensors().values())
    for folder in ("stock", "ours"):
        found = benchmarks["true_bits"].rates(tmp_path / folder, source)
        assert found.linear == 4.5  # 4 bits, and a bf16 scale and offset for 64 of them; float biases are not counted
        size = (tmp_path / folder / "model.safetensors").stat().st_size
        assert (found.weight_bytes, found.total) == (size, 8 * size / weights)
    assert benchmarks["true_bits"].rates(source, source).linear == 16


def test_float32_scales_are_paid_for(benchmarks, tmp_path):
    source = write_tiny(tmp_path / "source")
    stock_convert([(source, tmp_path / "stock", {"quantize": True, "q_bits": 4, "q_group_size": 64})])
    file = tmp_path / "stock" / "model.safetensors"
    tensors = load_file(file)
    wide = {name: t.astype(np.float32) if name.endswith(("scales", "biases")) else t for name, t in tensors.items()}
    save_file(wide, file, metadata={"format": "mlx"})
    assert benchmarks["true_bits"].rates(tmp_path / "stock", source).linear == 5.0


def test_what_cannot_be_counted_is_an_error(benchmarks, tmp_path):
    source = write_tiny(tmp_path / "source")
    convert(source, tmp_path / "ours", packing=Q4)
    file = tmp_path / "ours" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "extra": np.zeros(4, np.float32)}, file, metadata={"format": "mlx"})
    with pytest.raises(ValueError, match="its manifest lists"):
        benchmarks["true_bits"].rates(tmp_path / "ours", source)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no weight files"):
        benchmarks["true_bits"].rates(tmp_path / "empty", source)


def test_an_arm_that_fails_is_a_row_and_no_end(benchmarks, capsys):
    bench = benchmarks["bench_quality"]
    arm = bench.Arm(name="broken", method="gptq", settings={"bits": 3})

    def fail(error: BaseException) -> Any:
        raise error

    for error, reason in (
        (bench.ArmError("AssertionError: Unsupported bits 3"), "AssertionError: Unsupported bits 3"),
        (ValueError("no weight\nfiles | here"), "ValueError: no weight files / here"),
    ):
        row = bench.row_of(arm, lambda error=error: fail(error))
        lines = benchmarks["quality_table"].table(CONDITIONS, [row, scored("good", 4.5, 0.1)]).splitlines()
        assert lines[2].startswith("| good | 4.500 | 5.500 | 2.0 | 0.1000 ± 0.0200 | 30.00 | 50.0 % | 1.2 | a/way |")
        assert lines[3].startswith("| broken | –")
        assert f"not run: {reason} |" in lines[3]
    with pytest.raises(KeyboardInterrupt):
        bench.row_of(arm, lambda: fail(KeyboardInterrupt()))
    assert "broken: not scored" in capsys.readouterr().err


def test_the_table_says_under_which_conditions(benchmarks):
    rows = [scored("b", 4.5, 0.1), scored("c", 3.0, 0.9, minutes=None), scored("a", 4.5, 0.05)]
    rows[0]["facts"] = {"said": ["Validation: it=0, loss=0.5"]}
    lines = benchmarks["quality_table"].table(CONDITIONS, rows).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| c", "| a", "| b"]
    assert " | – | a/way |" in lines[2]
    assert "(Validation: it=0, loss=0.5)" in lines[4]
    assert "4 × 64 tokens from the end" in lines[-1]
    assert "source perplexity 20.00" in lines[-1]


def test_a_command_that_fails_or_takes_too_long_gives_its_reason(benchmarks):
    bench = benchmarks["bench_quality"]
    with pytest.raises(bench.ArmError, match=r"^ValueError: no$"):
        bench.run([sys.executable, "-c", "raise ValueError('no')"])
    with pytest.raises(bench.ArmError, match=r"^exit code 3$"):
        bench.run([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(bench.ArmError, match=r"^stopped after"):
        bench.run([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "gptq-4,nothing"], "--peers: nothing: known are rtn-4,"),
        (["--arm", "folder"], "expected NAME=FOLDER"),
        (["--arm", "a/b=folder"], "expected NAME=FOLDER"),
        (["--arm", "rtn-4=folder"], "two arms are called rtn-4"),
        (["--peers", "none"], "no arm"),
    ],
)
def test_arms_that_cannot_be_meant_are_refused(benchmarks, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        benchmarks["bench_quality"].parse(["src", "--text", "t.txt", *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_the_key_of_an_artifact_covers_what_it_is_made_from(benchmarks, tmp_path):
    bench = benchmarks["bench_quality"]
    write_tiny(tmp_path / "rtn-4-head6")
    setting, arms = bench.parse(["src", "--text", "t.txt", "--work", str(tmp_path), "--peers", "gptq-4,dwq-4"])
    conditions = {"source": "s", "rows": "r", "versions": {}}
    keys = [bench.making_key(setting, arm, conditions) for arm in arms]
    keys += [bench.making_key(setting, arms[0], {**conditions, name: "other"}) for name in conditions]
    config = json.loads((tmp_path / "rtn-4-head6" / "config.json").read_text())
    (tmp_path / "rtn-4-head6" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-6}))
    keys.append(bench.making_key(setting, arms[1], conditions))  # another student
    assert len(set(keys)) == len(keys)
    assert bench.making_key(setting, arms[0], conditions) == keys[0]


def test_the_faster_ways_compute_the_same(benchmarks):
    import mlx.core as mx
    import mlx.nn as nn

    peers = benchmarks["quality_peers"]
    mx.random.seed(1)
    for bits in (3, 4, 6):
        layer = nn.QuantizedLinear.from_linear(nn.Linear(128, 24), group_size=64, bits=bits)
        x = mx.random.normal((2, 5, 128))
        # Both sum 128 products in float32: some 128 · 2^-24 of |x|·|w|, which is near 1 here.
        np.testing.assert_allclose(np.array(peers._linear(layer, x)), np.array(layer(x)), atol=2e-5)
        table = nn.QuantizedEmbedding.from_embedding(nn.Embedding(40, 64), group_size=64, bits=bits)
        ids = mx.array([3, 39, 0])
        np.testing.assert_allclose(np.array(peers._embed(table, ids)), np.array(table(ids)), atol=1e-6)
    root = np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32)
    matrix = mx.array(root @ root.T + 40 * np.eye(40, dtype=np.float32))
    for upper in (False, True):
        factor = peers._cholesky(matrix, upper=upper)
        with mx.stream(mx.cpu):
            stock = mx.linalg.cholesky(matrix, upper=upper)
            inverse = mx.linalg.cholesky_inv(stock, upper=upper)
        np.testing.assert_allclose(np.array(factor), np.array(stock), atol=1e-4)
        np.testing.assert_allclose(np.array(peers._cholesky_inv(factor, upper=upper)), np.array(inverse), atol=1e-5)


def test_scales_and_offsets_have_the_gradients_of_the_formula(benchmarks):
    import mlx.core as mx
    import mlx.nn as nn

    layer = nn.QuantizedLinear.from_linear(nn.Linear(128, 8, bias=False), group_size=64, bits=4)
    x, y = mx.random.normal((3, 128)), mx.random.normal((3, 8))

    def loss(scales: mx.array, biases: mx.array) -> mx.array:
        layer.scales, layer.biases = scales, biases
        return (benchmarks["quality_peers"]._linear(layer, x) * y).sum()

    words, scales = layer.weight, layer.scales
    grads = mx.grad(loss, argnums=(0, 1))(scales, layer.biases)
    codes = np.array(mx.dequantize(words, mx.ones_like(scales), mx.zeros_like(scales), group_size=64, bits=4))
    outer = (np.array(y).T @ np.array(x)).reshape(8, 2, 64)
    np.testing.assert_allclose(np.array(grads[0]), (outer * codes.reshape(8, 2, 64)).sum(-1), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(np.array(grads[1]), outer.sum(-1), rtol=1e-4, atol=1e-4)


def test_a_recipe_chooses_its_bits_behind_the_windows_that_are_scored(benchmarks, tmp_path):
    bench = benchmarks["bench_quality"]
    setting = bench.parse(["SRC", "--text", "t.txt", "--work", str(tmp_path), "--windows", "8", "--context", "256"])[0]
    recipes = Path(BENCHMARKS).parent / "recipes"
    changes = bench.recipe_changes(setting, recipes / "trellis-kmap-3.0.yaml")
    assert {f"allocation.text={setting.text}", "allocation.skip=8", "allocation.context=256"} <= set(changes)
    assert {f"calibration.text={setting.text}", "evaluation=null"} <= set(changes)
    assert not [change for change in bench.recipe_changes(setting, recipes / "gptq4.yaml") if "allocation" in change]
