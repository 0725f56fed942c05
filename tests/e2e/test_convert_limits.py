"""What only a process of its own shows: peak memory, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.conversions import plan
from tests.support.tensors import all_files
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.artifact.verify import verify_artifact
from tqtool.formats.dtypes import DType
from tqtool.formats.safetensors import build_header

BUDGET_EXTRA = 300_000_000
WIDE = Tiny(hidden=1024, intermediate=4096, heads=8, kv_heads=8, head_dim=128, vocab=16384)
LARGEST_FLOAT32 = 4 * WIDE.vocab * WIDE.hidden  # the embedding, 67 MB

CHILD = """
import sys, json
from pathlib import Path
from tests.support.conversions import Q4, plan
from tqtool.formats.dtypes import DType
source, out, options = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
options["packing"] = Q4 if options.pop("packed") else None
if "dtype" in options:
    options["dtype"] = DType.F32
job = plan(source, out, **options)
job.run()
status = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
heavy = sorted({"mlx_lm", "transformers", "torch", "huggingface_hub"} & set(sys.modules))
print(json.dumps({"peak": peak, "estimate": job.plan.totals.peak_memory_bytes, "heavy": heavy}))
"""


def write_wide(folder: Path, layers: int) -> Path:
    """A checkpoint of ``layers`` layers whose values repeat, streamed so that the test stays small too."""
    tiny = Tiny(**{**WIDE.__dict__, "layers": layers})
    write_tiny(folder, Tiny(layers=1), tokenizer=True)
    (folder / "config.json").write_text(json.dumps(tiny.config()))
    (folder / "model.safetensors").unlink()
    block = np.random.default_rng(0).standard_normal(1 << 16, dtype=np.float32).astype(ml_dtypes.bfloat16)
    square, up, down = (tiny.hidden, tiny.hidden), (tiny.intermediate, tiny.hidden), (tiny.hidden, tiny.intermediate)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (tiny.vocab, tiny.hidden)}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        shapes |= {f"{stem}.self_attn.{name}_proj.weight": square for name in "qkvo"}
        shapes |= {f"{stem}.mlp.gate_proj.weight": up, f"{stem}.mlp.up_proj.weight": up}
        shapes |= {f"{stem}.mlp.down_proj.weight": down}
        shapes |= {f"{stem}.{norm}_layernorm.weight": (tiny.hidden,) for norm in ("input", "post_attention")}
    shapes["model.norm.weight"] = (tiny.hidden,)
    header, _ = build_header([(name, DType.BF16, shape) for name, shape in shapes.items()], {"format": "pt"})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        for shape in shapes.values():
            whole, rest = divmod(int(np.prod(shape)), block.size)
            for _ in range(whole):
                file.write(block.tobytes())
            file.write(block[:rest].tobytes())
    return folder


def peak_of(source: Path, out: Path, **options: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-E", "-c", CHILD, str(source), str(out), json.dumps(options)],  # -E: torch can be found
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="VmHWM is read from /proc")
def test_peak_memory_is_bounded_and_independent_of_the_models_size(tmp_path: Path) -> None:
    small, large = write_wide(tmp_path / "small", 1), write_wide(tmp_path / "large", 10)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (small, large)]
    assert sizes[0] < 70e6
    assert sizes[1] > 350e6
    arms: dict[str, dict[str, object]] = {
        "packed": {"packed": True},
        "rotated": {"packed": True, "rotation_seed": 42},
        "folded": {"packed": False, "rotation_seed": 42},
        "cast": {"packed": False, "dtype": "f32"},
    }
    for name, options in arms.items():
        first = peak_of(small, tmp_path / f"{name}-small", **options)
        second = peak_of(large, tmp_path / f"{name}-large", **options)
        budget = 3 * LARGEST_FLOAT32 + BUDGET_EXTRA
        assert second["peak"] <= budget, (name, first, second)
        assert second["heavy"] == []
        # Nothing that grows with the model is held: a tenth of the added bytes would show.
        assert second["peak"] - first["peak"] < 0.1 * (sizes[1] - sizes[0]), (name, first, second)
        # The plan's estimate is an upper bound and not a wild one.
        assert 0.5 * second["estimate"] <= second["peak"] <= 1.1 * second["estimate"], (name, second)


def check_peak(folder: Path, depth: str) -> int:
    """Peak memory of the reload check, whose only child it is."""
    code = f"""
import resource, subprocess, sys
subprocess.run([sys.executable, "-P", "-m", "tqtool.artifact.reload", {str(folder)!r}, "--depth", {depth!r}],
               check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="ru_maxrss is in KiB on Linux only")
def test_the_forward_check_holds_one_layer_at_a_time(tmp_path: Path) -> None:
    """Ten layers of 33 MB in bf16 may add what two of them weigh, not ten."""
    peaks = {}
    for layers in (1, 10):
        source, out = write_wide(tmp_path / f"source{layers}", layers), tmp_path / f"out{layers}"
        job = plan(source, out, packing=None)
        job.run()
        peaks[layers] = check_peak(out, "forward")
        assert peaks[layers] <= 1.1 * job.plan.totals.check_memory_bytes
    assert peaks[10] - peaks[1] < 2 * 33_600_000


SLOW_CHILD = """
import sys, time
from pathlib import Path
from tests.support.conversions import plan
def progress(amount, what):
    sys.stdout.write(what + "\\n"); sys.stdout.flush()
    time.sleep(0.2)
plan(Path(sys.argv[1]), Path(sys.argv[2])).run(progress)
"""


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_killed_in_mid_write(tmp_path: Path, kind: signal.Signals) -> None:
    source, out = write_tiny(tmp_path / "source"), tmp_path / "out"
    command = [sys.executable, "-c", SLOW_CHILD, str(source), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        for _ in range(3):
            child.stdout.readline()
        os.kill(child.pid, kind)
        child.wait(timeout=30)
    left = sorted(path.name for path in tmp_path.iterdir())
    partial = f".out.partial-{child.pid}"
    assert left == ([partial, "source"] if kind is signal.SIGKILL else ["source"])

    done = subprocess.run(
        [sys.executable, "-c", SLOW_CHILD.replace("time.sleep(0.2)", ""), str(source), str(out)], check=False
    )
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert verify_artifact(out, depth="none").is_good


def test_two_writers_do_not_mix(tmp_path: Path) -> None:
    """A second run of the same name while the first still writes: each has its own folder, one of them wins whole."""
    source, out = write_tiny(tmp_path / "source"), tmp_path / "out"
    command = [sys.executable, "-c", SLOW_CHILD.replace("0.2", "0.05"), str(source), str(out)]
    children = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    codes = sorted(child.wait(timeout=60) for child in children)
    assert codes == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert verify_artifact(out, depth="none").is_good
    assert all_files(out)["model.safetensors"]
