"""Ours against the peers in one run: every arm from one source, one calibration text, one teacher dump.

    python benchmarks/bench_quality.py SRC --text wiki.txt --work DIR
        [--peers rtn-4,gptq-4,… | none] [--recipe recipes/gptq4.yaml]… [--arm NAME=FOLDER]…

Peers are stock mlx-lm's methods (``quality_peers.py``). Calibration is read from the end of the text, scoring from its
start; that they share nothing is checked. Peers and recipes get the same rows; an artifact given with --arm was made
elsewhere, and its row says so. Every score is `tqtool eval kl` in float32 with quantized layers made dense.

An arm that cannot run is a row with the reason. A second run takes an artifact that was made with the same settings
from the same source and rows, and a score of the same artifact, dump and scoring code, and says so; --fresh does not.

Writes quality.md and quality.json into the work folder.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from quality_table import table
from true_bits import rates

ROOT = Path(__file__).parent.parent
TQTOOL = Path(sys.executable).with_name("tqtool")
PEERS_SCRIPT = ROOT / "benchmarks" / "quality_peers.py"
PACKAGES = ("mlx", "mlx-lm", "numpy", "scipy")
NOTABLE = ("Validation:", "[WARNING]")
"""Lines a peer prints about itself that belong in its row."""


class ArmError(Exception):
    """An arm could not be made or scored; the message becomes its row."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all arms share."""

    source: Path
    text: Path
    work: Path
    rows: int
    context: int
    windows: int
    limit_s: float
    fresh: bool

    @property
    def dump(self) -> Path:
        """The teacher's dump."""
        return self.work / "teacher.safetensors"

    @property
    def tokens(self) -> Path:
        """The calibration rows, uint32 [rows, context]."""
        return self.work / "rows.npy"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row: a peer's ``method`` with ``settings``, a ``recipe``, or a ``folder`` made elsewhere."""

    name: str
    method: str | None = None
    settings: Mapping[str, Any] | None = None
    recipe: Path | None = None
    folder: Path | None = None

    def how(self) -> str:
        """What the row says about the way."""
        if self.method is not None:
            return " ".join((self.method, *(f"{key}={value}" for key, value in (self.settings or {}).items())))
        return f"recipe {self.recipe.name}" if self.recipe is not None else "given; calibrated elsewhere if at all"


def peers(work: Path, arguments: argparse.Namespace) -> dict[str, Arm]:
    """Stock mlx-lm's methods at 4 bits; what looks up or predicts tokens takes 6 bits except in plain ``rtn-4``."""
    common = {"bits": 4, "group_size": 64}
    with_head = {**common, "head_bits": 6}
    low_high = {"low_bits": 4, "high_bits": 5, "group_size": 64, "target_bpw": arguments.dynamic_bpw}
    training = {
        "learning_rate": arguments.dwq_rate,
        "passes": arguments.dwq_passes,
        "train_rows": arguments.dwq_rows or arguments.rows,
        "context": arguments.dwq_context or arguments.context,
        "valid_rows": 2,
    }
    arms = (
        Arm(name="rtn-4", method="rtn", settings=common),
        Arm(name="rtn-4-head6", method="rtn", settings=with_head),
        Arm(name="gptq-4", method="gptq", settings=with_head),
        Arm(name="awq-4", method="awq", settings={**with_head, "n_grid": arguments.awq_grid}),
        Arm(name="dwq-4", method="dwq", settings={"student": "rtn-4-head6", **training}),
        Arm(name="dynamic", method="dynamic", settings=low_high),
    )
    return {arm.name: arm for arm in arms}


def parse(argv: Sequence[str] | None = None) -> tuple[Setting, list[Arm]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SRC", help="folder of the float model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "quality")
    parser.add_argument("--rows", type=int, default=16, help="calibration rows")
    parser.add_argument("--context", type=int, default=512, help="tokens of a calibration row and of a scored window")
    parser.add_argument("--windows", type=int, default=4, help="scored windows")
    parser.add_argument("--peers", default="rtn-4,rtn-4-head6,gptq-4,awq-4,dwq-4,dynamic", help="names, or none")
    parser.add_argument("--recipe", type=Path, action="append", default=[], help="repeatable")
    parser.add_argument("--arm", action="append", default=[], metavar="NAME=FOLDER", help="repeatable")
    parser.add_argument("--awq-grid", type=int, default=20, help="mlx-lm's default is 20")
    parser.add_argument(
        "--dwq-rate", type=float, default=1e-6, help="mlx-lm's default is 1e-6, for 512 steps of 4 rows"
    )
    parser.add_argument("--dwq-passes", type=int, default=1)
    parser.add_argument("--dwq-rows", type=int, help="rows it trains on at most; all but 2 unless given")
    parser.add_argument("--dwq-context", type=int, help="tokens of those rows; --context unless given")
    parser.add_argument("--dynamic-bpw", type=float, default=5.0, help="mlx-lm's default is 5.0")
    parser.add_argument("--limit-minutes", type=float, default=30.0, help="a peer is stopped after so long")
    parser.add_argument("--fresh", action="store_true", help="reuse nothing")
    arguments = parser.parse_args(argv)
    known = peers(arguments.work, arguments)
    chosen = [] if arguments.peers == "none" else arguments.peers.split(",")
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"--peers: {', '.join(unknown)}: known are {', '.join(known)}")
    arms = [known[name] for name in chosen] + [Arm(name=path.stem, recipe=path) for path in arguments.recipe]
    for text in arguments.arm:
        name, equals, folder = text.partition("=")
        if not equals or not name or "/" in name:
            parser.error(f"--arm {text}: expected NAME=FOLDER")
        arms.append(Arm(name=name, folder=Path(folder)))
    names = [arm.name for arm in arms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        parser.error(f"two arms are called {', '.join(twice)}")
    if not arms:
        parser.error("no arm: give --peers, --recipe or --arm")
    setting = Setting(
        source=arguments.source.resolve(),
        text=arguments.text.resolve(),
        work=arguments.work.resolve(),
        rows=arguments.rows,
        context=arguments.context,
        windows=arguments.windows,
        limit_s=60 * arguments.limit_minutes,
        fresh=arguments.fresh,
    )
    return setting, arms


def main() -> None:
    setting, arms = parse()
    setting.work.mkdir(parents=True, exist_ok=True)
    conditions = prepare(setting)
    rows = []
    for arm in arms:
        rows.append(row_of(arm, lambda arm=arm: run_arm(setting, arm, conditions)))
        write_report(setting, conditions, rows)
    print((setting.work / "quality.md").read_text())
    say(f"{setting.work / 'quality.md'}\n{setting.work / 'quality.json'}")


# ------------------------------------------------------------------------------------------------- the arms
def row_of(arm: Arm, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row of ``arm``; whatever fails is the row's ``failed``, and the other arms go on."""
    say(f"\n== {arm.name}: {arm.how()}")
    started = time.monotonic()
    try:
        return {"name": arm.name, "how": arm.how(), **work()}
    except (ArmError, OSError, ValueError, KeyError) as error:
        reason = f"{error}" if isinstance(error, ArmError) else f"{type(error).__name__}: {error}"
        say(f"{arm.name}: not scored: {reason}")
        minutes = (time.monotonic() - started) / 60
        return {"name": arm.name, "how": arm.how(), "failed": reason, "minutes": minutes}


def run_arm(setting: Setting, arm: Arm, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Make the artifact, count its bytes, score it; each step reused where nothing that it depends on changed."""
    made = artifact_of(setting, arm, conditions)
    folder = Path(made["folder"])
    counted = rates(folder, setting.source)
    return {
        **made,
        "linear_bits_per_weight": counted.linear,
        "bits_per_weight": counted.total,
        "weight_bytes": counted.weight_bytes,
        **score(setting, arm, folder, made["content"], conditions),
    }


def artifact_of(setting: Setting, arm: Arm, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Folder, content hash and making time of the arm's artifact."""
    if arm.folder is not None:
        if not (arm.folder / "config.json").is_file():
            raise ArmError(f"{arm.folder}: no model there")
        return {"folder": str(arm.folder), "content": content_of(arm.folder), "minutes": None, "facts": {}}
    target, stamp = setting.work / arm.name, setting.work / f"{arm.name}.made.json"
    folder = target / "artifact" if arm.recipe is not None else target
    key = making_key(setting, arm, conditions)
    if not setting.fresh and stamp.exists() and (folder / "config.json").is_file():
        made = json.loads(stamp.read_text())
        if made["key"] == key and made["content"] == content_of(folder):
            say(f"{arm.name}: artifact reused ({made['content'][:12]})")
            return {name: value for name, value in made.items() if name != "key"} | {"folder": str(folder)}
    stamp.unlink(missing_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    started = time.monotonic()
    facts = make_recipe(setting, arm, target) if arm.recipe is not None else make_peer(setting, arm, target)
    minutes = (time.monotonic() - started) / 60
    made = {"content": content_of(folder), "minutes": minutes, "facts": facts}
    stamp.write_text(json.dumps({"key": key, **made}))
    return {"folder": str(folder), **made}


def making_key(setting: Setting, arm: Arm, conditions: Mapping[str, Any]) -> str:
    """Hash of what an artifact depends on; a student is part of it."""
    settings = dict(arm.settings or {})
    if "student" in settings:
        settings["student"] = content_of(student_of(setting, arm))
    code = tree_hash(Path(sys.modules["tqtool"].__path__[0])) if arm.recipe is not None else sha256(PEERS_SCRIPT)
    recipe = None if arm.recipe is None else sha256(arm.recipe)
    shared = {name: conditions[name] for name in ("source", "rows", "versions")}
    return digest(arm.method, settings, recipe, code, shared)


def make_peer(setting: Setting, arm: Arm, target: Path) -> dict[str, Any]:
    """Run the peer's method in a process of its own; what it printed about itself."""
    settings = dict(arm.settings or {})
    if "student" in settings:
        settings["student"] = str(student_of(setting, arm))
    command = [sys.executable, str(PEERS_SCRIPT), str(arm.method), str(setting.source), str(target)]
    command += ["--rows", str(setting.tokens), "--settings", json.dumps(settings)]
    try:
        lines = run(command, limit_s=setting.limit_s).splitlines()
    except ArmError:
        shutil.rmtree(target, ignore_errors=True)
        raise
    said = [line.strip() for line in lines if line.strip().startswith(NOTABLE)]
    return {**json.loads(lines[-1]), "said": said}


def student_of(setting: Setting, arm: Arm) -> Path:
    """The artifact of another arm that this one starts from."""
    name = (arm.settings or {})["student"]
    if not (setting.work / name / "config.json").is_file():
        raise ArmError(f"needs the arm {name}, which is not there")
    return setting.work / name


def make_recipe(setting: Setting, arm: Arm, target: Path) -> dict[str, Any]:
    """`tqtool run` on our source, text and sizes; the scoring is done here, like everybody's."""
    sets = [part for change in recipe_changes(setting, arm.recipe) for part in ("--set", change)]
    return json.loads(run([str(TQTOOL), "run", str(arm.recipe), str(target), *sets, "--json"]))


def recipe_changes(setting: Setting, path: Path) -> list[str]:
    """What makes a recipe one of our arms: source, text, sizes; bits are chosen behind the windows that are scored."""
    from tqtool.recipes.schema import read_recipe

    changes = [f"source={setting.source}", "evaluation=null"]
    recipe = read_recipe(path)
    if recipe.allocation is not None:
        changes += [f"allocation.text={setting.text}", f"allocation.context={setting.context}"]
        changes += [f"allocation.skip={setting.windows}"]
    if recipe.needs_hessians:
        changes += [f"calibration.text={setting.text}", f"calibration.rows={setting.rows}"]
        changes += [f"calibration.context={setting.context}"]
    return changes


def score(setting: Setting, arm: Arm, folder: Path, content: str, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """The report of `tqtool eval kl` on ``folder``."""
    stored, key = setting.work / f"{arm.name}.score.json", digest(content, conditions["dump"], conditions["scoring"])
    if not setting.fresh and stored.exists() and (found := json.loads(stored.read_text()))["key"] == key:
        say(f"{arm.name}: score reused ({content[:12]})")
        return {"score": found["score"]}
    command = [str(TQTOOL), "eval", "kl", str(folder), "--teacher", str(setting.dump), "--compute", "expand", "--json"]
    report = json.loads(run(command))
    stored.write_text(json.dumps({"key": key, "score": report}))
    return {"score": report}


# ----------------------------------------------------------------------------------------- what is shared
def prepare(setting: Setting) -> dict[str, Any]:
    """Teacher's dump and calibration rows; the conditions that every row was made under."""
    from tqtool.calibration.rows import read_rows, require_disjoint
    from tqtool.evals.text import read_windows
    from tqtool.formats.teacher import open_dump
    from tqtool.runtime.load import load_tokenizer

    tokenizer = load_tokenizer(setting.source)
    calibration = read_rows(tokenizer, setting.text, rows=setting.rows, context=setting.context)
    scored = read_windows(tokenizer, setting.text, windows=setting.windows, context=setting.context)
    require_disjoint(calibration, scored.tokens, str(setting.text))
    np.save(setting.tokens, np.stack(calibration.sequences).astype(np.uint32))
    source, stamp = content_of(setting.source), setting.work / "teacher.key"
    key = digest(source, scored.text_sha256, setting.windows, setting.context)
    if setting.fresh or not setting.dump.exists() or not stamp.exists() or stamp.read_text() != key:
        command = [str(TQTOOL), "teacher", str(setting.source), str(setting.dump), "--text", str(setting.text)]
        run([*command, "--windows", str(setting.windows), "--context", str(setting.context), "--force"])
        stamp.write_text(key)
    else:
        say("teacher: dump reused")
    package = Path(sys.modules["tqtool"].__path__[0])
    return {
        "source": source,
        "model": setting.source.name,
        "text": setting.text.name,
        "calibration": f"{setting.rows} × {setting.context} tokens from the end",
        "rows": sha256(setting.tokens),
        "scored": f"{setting.windows} × {setting.context} tokens from the start",
        "dump": digest(open_dump(setting.dump).info.sha256),
        "scoring": tree_hash(package / "evals"),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "threads": os.environ.get("OPENBLAS_NUM_THREADS") or f"all of {os.cpu_count()}",
    }


def write_report(setting: Setting, conditions: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """quality.json and quality.md, after every arm: an interrupted run leaves what it has."""
    document = {"conditions": conditions, "rows": rows}
    (setting.work / "quality.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    (setting.work / "quality.md").write_text(table(conditions, rows))


# ---------------------------------------------------------------------------------------------- plumbing
def run(command: Sequence[str], *, limit_s: float | None = None) -> str:
    """Stdout of ``command``; ArmError with the last line of its stderr, or with the limit that it ran into."""
    say("$ " + shlex.join(command).replace(f"{ROOT}/", ""))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise ArmError(f"stopped after {error.timeout / 60:.0f} minutes") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ArmError(lines[-1].strip() if lines else f"exit code {done.returncode}")
    return done.stdout


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_hash(folder: Path) -> str:
    """Hash of the code in ``folder``."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".so"))
    return digest([(str(path.relative_to(folder)), sha256(path)) for path in files])


def content_of(folder: Path) -> str:
    """Hash of config and weights, whoever wrote them."""
    from tqtool.artifact.content import content_hash

    return content_hash(folder)


if __name__ == "__main__":
    main()
