"""Peak memory and time at the true size of a 27B qwen3_5, on a checkpoint that needs little disk.

The checkpoint has the names and shapes of the 27B model. The layers asked for hold random values; all other tensors are
holes of a sparse file, which read as zeros. ``inspect`` and ``--dry-run`` see all 64 layers; what reads weights gets a
model of the first layers alone. Every command is a process of its own; memory is its peak resident set.

    python benchmarks/true_size.py [--part all] [--layers 4] [--work DIR] [--json]

``--part write``: inspect, plans, convert, trellis, then what convert wrote is verified (stock mlx-lm, one forward) and
generates two tokens. ``--part solve``: one layer of each kind under a vocabulary of a tokenizer's bytes, so that only
layers count: calibrate over 128 tokens, feedback (LDLQ) on the widest matrix, down_proj, and on in_proj_qkv, all other
tensors dense; the result generates two tokens.

Sizes: 5120 wide, 64 layers of which every fourth has full attention (24 heads of 256, 4 for keys), 48 value and 16 key
heads of 128 in the others, MLPs of 17408, a vocabulary of 248320, head apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tqtool.formats.dtypes import DType
from tqtool.formats.safetensors import build_header
from tqtool.transform.delta_net import DeltaNet, is_linear

ROOT = Path(__file__).parents[1]
LAYERS = 64
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
SMALL: dict[str, Any] = {**TEXT, "vocab_size": 320, "full_attention_interval": 2}
"""Two layers have both kinds; ids are a byte-level tokenizer's."""
ROWS, CONTEXT = 2, 64
BLOCK = 1 << 24
SHARD_BYTES = 5 << 30
LAST_LINEAR, LAST_FULL = 2, 3
"""The layers that the trellis run codes: linear attention of one, the MLP of the other."""


Job = tuple[str, list[Any], int]
"""Name, arguments of ``tqtool``, weights that it reads and codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One command: wall and processor time in seconds, peak resident bytes, weights that it read and coded."""

    name: str
    wall_s: float
    cpu_s: float
    peak_bytes: int
    weights: int

    def text(self) -> str:
        """One line."""
        rate = f", {self.weights / self.wall_s / 1e6:.1f} Mw/s" if self.weights else ""
        times = f"{self.wall_s:.1f} s, {self.cpu_s:.1f} s of processor time"
        return f"{self.name}: {times}, peak {self.peak_bytes / 1e6:.0f} MB{rate}"


def main() -> None:
    """Make the checkpoints, run the commands, print a row each."""
    sys.path.insert(0, str(ROOT))
    options = _options()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.work) as place:
        if options.part in ("all", "write"):
            rows += run_all(write_jobs(Path(place), options.layers))
    with tempfile.TemporaryDirectory(dir=options.work) as place:
        if options.part in ("all", "solve"):
            rows += run_all(solve_jobs(Path(place)))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))


def run_all(jobs: list[Job]) -> list[Row]:
    """A row for each job, printed as it is done."""
    rows = []
    for name, arguments, weights in jobs:
        rows.append(run(name, arguments, weights))
        print(rows[-1].text(), flush=True)
    return rows


def write_jobs(work: Path, layers: int) -> list[Job]:
    """What reads headers sees the whole model, what reads weights its first ``layers`` layers, head and embedding."""
    whole = write_checkpoint(work / "whole", LAYERS, filled=0)
    part = write_checkpoint(work / "part", layers, filled=layers)
    weights = sum(math.prod(shape) for name, shape in tensors(layers) if ".layers." in name)
    stem = "language_model.model.layers"
    coded = (f"{stem}.{LAST_LINEAR}.linear_attn.in_proj_qkv", f"{stem}.{LAST_LINEAR}.linear_attn.out_proj")
    mlp = tuple(f"{stem}.{LAST_FULL}.mlp.{part}_proj" for part in ("gate", "up", "down"))
    modules = [option for module in (*coded, *mlp) for option in ("--modules", module)]
    n_coded = sum(
        math.prod(shape)
        for name, shape in tensors(layers)
        if name.replace("model.language_model.", "language_model.model.").removesuffix(".weight") in (*coded, *mlp)
    )
    return [
        ("inspect, 64 layers", ["inspect", whole], 0),
        ("convert --dry-run, 64 layers", ["convert", whole, work / "a", "-q", "--rotate-weights", "--dry-run"], 0),
        ("trellis --dry-run, 64 layers", ["trellis", whole, work / "b", "--modules", "all", "--dry-run"], 0),
        (f"convert -q, {layers} layers", ["convert", part, work / "q", "-q", "--check", "none"], weights),
        (
            f"convert -q --rotate-weights, {layers} layers",
            ["convert", part, work / "r", "-q", "--rotate-weights", "--check", "none"],
            weights,
        ),
        (
            f"trellis -k 3 of one MLP and one linear attention, {n_coded / 1e6:.0f} M weights",
            ["trellis", part, work / "t", "-k", 3, *modules, "--check", "none"],
            n_coded,
        ),
        *served_jobs(f"convert -q --rotate-weights, {layers} layers", work / "r"),
    ]


def solve_jobs(work: Path) -> list[Job]:
    """Calibration and feedback, one layer of each kind."""
    source = write_checkpoint(work / "small", 2, filled=2, text=SMALL)
    stem = "language_model.model.layers"
    coded = (f"{stem}.0.linear_attn.in_proj_qkv", f"{stem}.1.mlp.down_proj")
    shapes = dict(tensors(2, SMALL))
    names = {module: f"{module.replace('language_model.model', 'model.language_model')}.weight" for module in coded}
    n_coded = sum(math.prod(shapes[name]) for name in names.values())
    outputs = [name.replace("model.language_model.", "language_model.model.") for name in shapes]
    dense = [f"{module.removesuffix('.weight')}" for module in outputs if module.endswith("_proj.weight")]
    dense += [module.removesuffix(".weight") for module in outputs if ".in_proj_" in module]
    dense += ["language_model.model.embed_tokens", "language_model.lm_head"]
    rules = [option for module in dense if module not in coded for option in ("--rule", f"{module}=float")]
    modules = [option for module in coded for option in ("--modules", module)]
    text = ("--text", ROOT / "LICENSE", "--rows", ROWS, "--context", CONTEXT, "--rotate-weights")
    solve = ["trellis", source, work / "t", "-k", 3, *modules, *rules, "--ldlq", work / "h", "--check", "none"]
    return [
        (f"calibrate, 2 layers, {ROWS * CONTEXT} tokens", ["calibrate", source, work / "h", *text], 0),
        (f"trellis -k 3 --ldlq of down_proj and in_proj_qkv, {n_coded / 1e6:.0f} M weights", solve, n_coded),
        *served_jobs("trellis --ldlq, 2 layers", work / "t"),
    ]


def served_jobs(what: str, folder: Path) -> list[Job]:
    """Loading what was written: in stock mlx-lm with one forward of six tokens, and in the runtime."""
    answer = ["generate", folder, "--prompt", "a", "--raw", "--max-tokens", 2]
    return [
        (f"verify of {what}", ["verify", folder], 0),
        (f"generate, 1 + 2 tokens, {what}", answer, 0),
    ]


def run(name: str, arguments: list[Any], weights: int) -> Row:
    """One command in a process of its own; its failure ends the script."""
    command = [str(Path(sys.executable).with_name("tqtool")), *map(str, arguments)]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}\n{told}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    cpu = usage.ru_utime + usage.ru_stime
    return Row(name=name, wall_s=time.perf_counter() - started, cpu_s=cpu, peak_bytes=peak, weights=weights)


def tensors(layers: int, text: dict[str, Any] = TEXT) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as Hugging Face has them."""
    hidden, inner, head = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    query, key = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    stem = "model.language_model"
    yield f"{stem}.embed_tokens.weight", (text["vocab_size"], hidden)
    net = DeltaNet(key_heads=16, value_heads=48, key_dim=128, value_dim=128, kernel=4)
    for layer in range(layers):
        if is_linear(layer, text):
            parts = [(name, shape) for _, name, shape in net.tensors(hidden)]
        else:
            parts = [
                ("self_attn.q_proj.weight", (2 * query, hidden)),
                ("self_attn.k_proj.weight", (key, hidden)),
                ("self_attn.v_proj.weight", (key, hidden)),
                ("self_attn.o_proj.weight", (hidden, query)),
                ("self_attn.q_norm.weight", (head,)),
                ("self_attn.k_norm.weight", (head,)),
            ]
        parts += [
            ("input_layernorm.weight", (hidden,)),
            ("post_attention_layernorm.weight", (hidden,)),
            ("mlp.gate_proj.weight", (inner, hidden)),
            ("mlp.up_proj.weight", (inner, hidden)),
            ("mlp.down_proj.weight", (hidden, inner)),
        ]
        yield from ((f"{stem}.layers.{layer}.{name}", shape) for name, shape in parts)
    yield f"{stem}.norm.weight", (hidden,)
    yield "lm_head.weight", (text["vocab_size"], hidden)


def write_checkpoint(folder: Path, layers: int, *, filled: int, text: dict[str, Any] = TEXT) -> Path:
    """A checkpoint in bf16 with random values in the first ``filled`` layers and holes elsewhere, and a tokenizer."""
    from tests.support.tiny_bpe import write_bpe

    folder.mkdir()
    write_bpe(folder)
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": {**text, "num_hidden_layers": layers},
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    noise = (0.02 * rng.standard_normal(BLOCK, np.float32)).astype(ml_dtypes.bfloat16).view(np.uint8)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in tensors(layers, text):
        nbytes = 2 * math.prod(shape)
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += nbytes
    weight_map: dict[str, str] = {}
    for number, members in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {name: file for name, _ in members}
        header, _ = build_header([(name, DType.BF16, shape) for name, shape in members], {"format": "pt"})
        with (folder / file).open("wb") as out:
            out.write(header)
            for name, shape in members:
                _write_values(out, name, 2 * math.prod(shape), noise, filled, is_small=text is SMALL)
            out.truncate()
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _write_values(out: Any, name: str, nbytes: int, noise: Any, filled: int, *, is_small: bool) -> None:
    """Random values; a hole outside the filled layers, and for tables but small ones, which calibration reads."""
    layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else None
    if (layer is None and not is_small) or (layer is not None and layer >= filled):
        end = out.tell() + nbytes
        out.seek(end - 1)
        out.write(b"\0")  # the hole before it takes no room
        return
    left = nbytes
    while left:
        take = min(left, noise.size)
        out.write(noise[:take].data)
        left -= take


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "write", "solve"), default="all", help="what to run")
    parser.add_argument("--layers", type=int, default=4, help="layers with values, four at least (about 0.8 GB each)")
    parser.add_argument("--work", help="where the temporary files go")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON too")
    options = parser.parse_args()
    if options.layers <= LAST_FULL:
        parser.error(f"--layers {options.layers}: expected {LAST_FULL + 1} or more, so that both kinds are there")
    return options


if __name__ == "__main__":
    main()
