"""How does ``tqtool convert`` compare with ``mlx_lm.convert`` in time and peak memory, at the same settings?

Both run as whole commands, each in a fresh process, interleaved A/B/B/A; time is the wall time of the process with
its imports, memory the process's own peak resident set (VmHWM). The written tensors must be equal byte for byte,
otherwise the script fails. Without ``--model`` a random llama is made (``--synthetic-gb`` of bf16 weights).

    python benchmarks/bench_convert.py --json [--model DIR] [--synthetic-gb 1.0] [--bits 4] [--repeats 4]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from tqtool.formats.dtypes import DType
from tqtool.formats.safetensors import build_header, read_header

HIDDEN, INTERMEDIATE, VOCAB = 2048, 5632, 32000

CHILD = """
import sys, time
def hwm():
    try:
        lines = open("/proc/self/status").read().splitlines()
        return int(next(l for l in lines if l.startswith("VmHWM")).split()[1]) * 1024
    except FileNotFoundError:
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.perf_counter()
{body}
sys.stderr.write(f"\\nPEAK {{hwm()}} WORK {{time.perf_counter() - started}}\\n")
"""
TQTOOL = """
from pathlib import Path
from tqtool.pipeline.convert import ConvertRequest, plan_convert
from tqtool.pipeline.rules import packed_setting
started = time.perf_counter()
packing = packed_setting(bits={bits}, group_size={group}, mode={mode!r})
plan_convert(ConvertRequest(source={source!r}, out=Path({out!r}), packing=packing, rotation_seed={seed})).run()
"""
MLX_LM = """
from mlx_lm.convert import convert
started = time.perf_counter()
convert({source!r}, {out!r}, quantize=True, q_bits={bits}, q_group_size={group}, q_mode={mode!r})
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process: whole wall time, time after imports, peak resident bytes."""

    wall_s: float
    work_s: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median with its extremes."""

    median: float
    minimum: float
    maximum: float


def spread(values: list[float]) -> Spread:
    return Spread(median=statistics.median(values), minimum=min(values), maximum=max(values))


def run_child(body: str) -> Run:
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(body=body)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    wall = time.perf_counter() - started
    marks = [line for line in done.stderr.splitlines() if line.startswith("PEAK ")]
    if done.returncode or not marks:
        raise SystemExit(f"a conversion failed:\n{done.stderr[-2000:]}")
    _, peak, _, work = marks[-1].split()
    return Run(wall_s=wall, work_s=float(work), peak_bytes=int(peak))


def tensor_bytes(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of every shard."""
    found = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with file.open("rb") as stream:
            for info in read_header(file).tensors.values():
                stream.seek(info.begin)
                found[info.name] = (info.dtype.value, info.shape, stream.read(info.end - info.begin))
    return found


def differing(ours: Path, theirs: Path) -> list[str]:
    """Names of tensors that differ between two artifacts."""
    left, right = tensor_bytes(ours), tensor_bytes(theirs)
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def write_synthetic(folder: Path, gigabytes: float) -> Path:
    """A random bf16 llama of about ``gigabytes`` (1e9 bytes), in shards of a few layers; same largest tensor always."""
    layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN
    n_layers = max(1, round((gigabytes * 1e9 / 2 - VOCAB * HIDDEN) / layer))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": n_layers,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    groups = [shapes]
    for index in range(n_layers):
        stem = f"model.layers.{index}"
        linears = {f"self_attn.{p}_proj": (HIDDEN, HIDDEN) for p in "qkvo"}
        linears |= {"mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN)}
        linears |= {"mlp.down_proj": (HIDDEN, INTERMEDIATE)}
        layer_shapes: dict[str, tuple[int, ...]] = {f"{stem}.{name}.weight": shape for name, shape in linears.items()}
        layer_shapes |= {f"{stem}.{n}.weight": (HIDDEN,) for n in ("input_layernorm", "post_attention_layernorm")}
        if index % 4 == 0:
            groups.append({})
        groups[-1] |= layer_shapes
    weight_map = {}
    rng = np.random.default_rng(0)
    for number, group in enumerate(groups):
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        header, _ = build_header([(name, DType.BF16, shape) for name, shape in group.items()], {"format": "pt"})
        with (folder / file).open("wb") as stream:
            stream.write(header)
            for shape in group.values():
                values = rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-1]))
                stream.write(values.astype(ml_dtypes.bfloat16).tobytes())
        weight_map |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"})
    )


def largest_float32_bytes(source: Path) -> int:
    headers = [read_header(file) for file in source.glob("model*.safetensors")]
    return max(4 * int(np.prod(info.shape)) for header in headers for info in header.tensors.values())


def parameters(source: Path) -> int:
    headers = [read_header(file) for file in source.glob("model*.safetensors")]
    return sum(int(np.prod(info.shape)) for header in headers for info in header.tensors.values())


def measure(source: Path, work: Path, options: argparse.Namespace) -> dict[str, object]:
    seed = 42 if options.rotate else None
    settings = {"bits": options.bits, "group": options.group, "mode": options.mode, "source": str(source)}

    def ours(out: Path) -> Run:
        return run_child(TQTOOL.format(**settings, out=str(out), seed=seed))

    def theirs(out: Path) -> Run:
        return run_child(MLX_LM.format(**settings, out=str(out)))

    arms: dict[str, Callable[[Path], Run]] = {"tqtool": ours, "mlx_lm": theirs}
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    order = (["tqtool", "mlx_lm", "mlx_lm", "tqtool"] * options.repeats)[: 2 * options.repeats]
    kept = {name: work / f"kept-{name}" for name in arms}
    for number, name in enumerate(order):
        out = work / f"{number}-{name}"
        runs[name].append(arms[name](out))
        shutil.rmtree(kept[name], ignore_errors=True)
        out.rename(kept[name])
    different = [] if options.rotate else differing(kept["tqtool"], kept["mlx_lm"])
    count, largest = parameters(source), largest_float32_bytes(source)
    pairs = list(zip(runs["tqtool"], runs["mlx_lm"], strict=True))
    return {
        "source": source.name,
        "parameters": count,
        "largest_float32_bytes": largest,
        "memory_budget_bytes": 3 * largest + 300_000_000,
        "settings": {"bits": options.bits, "group": options.group, "mode": options.mode, "rotated": options.rotate},
        "order": order,
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "equal_bytes": None if options.rotate else not different,
        "different_tensors": different[:5],
        **{name: _summary(rows, count) for name, rows in runs.items()},
        "speedup_wall": asdict(spread([b.wall_s / a.wall_s for a, b in pairs])),
        "speedup_work": asdict(spread([b.work_s / a.work_s for a, b in pairs])),
    }


def _summary(rows: list[Run], count: int) -> dict[str, object]:
    return {
        "wall_s": asdict(spread([row.wall_s for row in rows])),
        "work_s": asdict(spread([row.work_s for row in rows])),
        "mw_per_s": count / 1e6 / statistics.median(row.wall_s for row in rows),
        "peak_mb": asdict(spread([row.peak_bytes / 1e6 for row in rows])),
    }


def show(result: dict[str, object]) -> None:
    print(f"{result['source']}: {result['parameters']:,} parameters, {result['settings']}")
    for name in ("tqtool", "mlx_lm"):
        row = result[name]
        wall, work, peak = row["wall_s"], row["work_s"], row["peak_mb"]
        print(
            f"  {name:7} wall {wall['median']:.2f} s [{wall['minimum']:.2f}, {wall['maximum']:.2f}]  after imports "
            f"{work['median']:.2f} s  {row['mw_per_s']:.0f} Mw/s  peak {peak['median']:.0f} MB"
        )
    for key in ("speedup_wall", "speedup_work"):
        ratio = result[key]
        print(f"  {key} {ratio['median']:.2f} [{ratio['minimum']:.2f}, {ratio['maximum']:.2f}]")
    print(f"  equal bytes: {result['equal_bytes']}; budget {result['memory_budget_bytes'] / 1e6:.0f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a bf16 model folder; without it a random one is made")
    parser.add_argument("--synthetic-gb", type=float, default=0.5)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--mode", default="affine")
    parser.add_argument("--rotate", action="store_true", help="rotate in tqtool (bytes are then not compared)")
    parser.add_argument("--repeats", type=int, default=4, help="runs of each, interleaved A/B/B/A")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-convert-") as folder:
        work = Path(folder)
        source = options.model or write_synthetic(work / f"synthetic-{options.synthetic_gb:g}gb", options.synthetic_gb)
        result = measure(source, work, options)
    if options.json:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        show(result)
    return 1 if result["equal_bytes"] is False else 0


if __name__ == "__main__":
    sys.exit(main())
