"""The family matrix: what holds for every architecture tqtool knows, by running it. Writes ``docs/families.md``.

    python benchmarks/family_matrix.py [CASE ...] [--write] [--check] [--work DIR]

Without cases all are run; ``--write`` with some replaces their rows and keeps the others.

Every case of ``tests/support/tiny_families.py`` is a small random model of the true architecture. It is folded in
float64 (transformers' own model), from files in both stacks (float32 and bf16), then goes the way of a user's model
through the command line: convert, calibrate, trellis, trellis with feedback, verify, stock mlx-lm, generate. A refusal
is printed as it is. This lies here and not beside the generators of ``docs/`` because it measures and takes minutes;
``--check`` takes no time: it compares names, variants and refusals of the page with the code, and a test does the same.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families.md"
TEXT = ROOT / "LICENSE"  # of which the tiny tokenizer makes about a token a byte
TQTOOL = (str(Path(sys.executable).with_name("tqtool")),)
SEED, ROWS, CONTEXT, SCORED, NEW_TOKENS, PROMPT = 42, 64, 64, 256, 8, "a cat and a dog"
FOLD_COLUMNS = ("float64", "KL float32", "KL bf16")
COMPANIONS = {
    f"{family} {tap}": (family, tap) for family in ("qwen3_5", "qwen3_5_moe") for tap in ("post_norm", "pre_norm")
}
COMPANION_COLUMNS = ("float64", "float32", "KL to the source", "8-bit", "4-bit", "mlx-lm beside it")
COMPANION_HEAD = """## Companions

The draft head for multi-token prediction (`--mtp`, [`formats/companion.md`](formats/companion.md)) of the two hybrids
above, random too: its final gain has nothing to do with its trunk's, and signs of its own, which is the worst case.

* **float64**, **float32**: drafts behind 39 positions, folded against the source's with what a fold cannot keep (the
  trunk's final gain for its own; of `post_norm` the norm before fc); largest difference over the largest logit. float64
  by the dense draft head, float32 by tqtool's runtime on the written artifact.
* **KL to the source**: mean KL(the source's drafts as they are ‖ folded), nats: what these two cost here.
* **8-bit**, **4-bit**: mean KL(dense ‖ packed) over the same trunk; verified.
* **mlx-lm beside it**: the artifact that holds it loads in stock mlx-lm and generates."""
COLUMNS = (*FOLD_COLUMNS, "convert -q", "calibrate", "trellis", "trellis --ldlq", "stock", "generate")

HEAD = """# Families

Written by `python benchmarks/family_matrix.py --write` (`--check`: names and refusals only). Each row is a small random
model of the true architecture (`tests/support/tiny_families.py`): weights of heavy tails, outlier channels, norm gains
of both signs and far from one, biases. {tools}.

* **float64**: largest difference of logits, folded against source, over the largest logit; transformers' model.
* **KL float32**, **KL bf16**: mean KL(source ‖ folded) in nats, weights stored so, through transformers / stock mlx-lm;
  of the hybrids the folded model runs in mlx-lm, against the source in each, and float64 is the dense decoder's.
* **convert -q**: rotated, 4-bit affine. **calibrate**: Hessians in the rotated basis. **trellis**: k = 3, every linear
  layer of the blocks, packed. **trellis --ldlq**: with feedback in tiles, `--fold-channels`, as `--fake-quant`. Each is
  verified; the figure is its mean KL to the source on 256 characters that the calibration does not read. It says that
  nothing is broken, not how good a method is: one random model each, whose mean a few positions decide.
* **stock**: `convert -q` and `--fake-quant` loaded by `mlx_lm.load` in a process without tqtool; they generate.
* **generate**: the packed artifact, `tqtool generate`.

"""


@dataclass(kw_only=True)
class Row:
    """One case; cells by column, refusal if the rotation was refused."""

    name: str
    cells: dict[str, str] = field(default_factory=dict)
    refusal: str | None = None

    def line(self, case: Any) -> str:
        """The row of the page's table."""
        return f"{_case_cells(self.name, case)} {' | '.join(self.cells.get(column, '') for column in COLUMNS)} |"


def main() -> None:
    sys.path.insert(0, str(ROOT))
    options = _options()
    if options.check:
        problems = page_problems(PAGE.read_text() if PAGE.exists() else "")
        sys.exit("\n".join(problems) if problems else 0)
    from tests.support.tiny_families import CASES

    lines = {}
    for name in options.cases or [*CASES, *COMPANIONS]:
        if name in COMPANIONS:
            with tempfile.TemporaryDirectory(dir=options.work) as work:
                lines[name] = measure_companion(name, Path(work))
            print(lines[name], flush=True)
            continue
        with tempfile.TemporaryDirectory(dir=options.work) as work:
            row = measure(name, Path(work))
        print(_row_text(row), flush=True)
        lines[name] = row.line(CASES[name])
    if options.write:
        kept = PAGE.read_text().splitlines() if options.cases else []
        PAGE.write_text(render(lines, kept))


def measure(name: str, work: Path) -> Row:
    """Run everything on one case."""
    from tests.support import family_parity as parity
    from tests.support.tiny_families import CASES, write_family
    from tqtool.transform.families import FAMILIES

    case, row = CASES[name], Row(name=name)
    source = write_family(work / "source", case)
    is_rotated = FAMILIES[case.model_type].rotation_refusal is None
    rotate = ("--rotate-weights", "--rotation-seed", str(SEED)) if is_rotated else ()
    _run("convert", source, work / "dense", "--dtype", "float32", "--check", "none")
    references = parity.transformers_logits(source), parity.mlx_logits(work / "dense")
    if is_rotated:
        row.cells["float64"] = f"{parity.exact_error(case, seed=SEED):.0e}"
        for column, dtype in (("KL float32", "float32"), ("KL bf16", "bfloat16")):
            _run("convert", source, work / dtype, *rotate, "--dtype", dtype, "--check", "none")
            found = parity.transformers_logits(work / dtype), parity.mlx_logits(work / dtype)
            pairs = zip(references, found, strict=True)
            row.cells[column] = " / ".join(f"{parity.mean_kl(*pair):.0e}" for pair in pairs)
    else:
        row.refusal = _refused("convert", source, work / "refused", "--rotate-weights")
        row.cells |= dict.fromkeys(FOLD_COLUMNS, "refused")
    trellis_rotate = () if is_rotated else ("--no-rotate-weights",)
    calibration = ("--rows", ROWS, "--context", CONTEXT, *rotate)
    _run("calibrate", source, work / "hessians", "--text", TEXT, *calibration)
    row.cells["calibrate"] = "pass"
    tokens = _tokens(source)
    expected = parity.mlx_logits(work / "dense", tokens)
    jobs: dict[str, tuple[Any, ...]] = {
        "convert -q": ("convert", source, work / "q4", "-q", "--bits", 4, *rotate),
        "trellis": ("trellis", source, work / "packed", "-k", 3, "--modules", "all", *trellis_rotate),
        "trellis --ldlq": ("trellis", source, work / "fake", "-k", 3, "--modules", "all", *trellis_rotate,
                           "--ldlq", work / "hessians", "--fold-channels", "--fake-quant"),
    }  # fmt: skip
    for column, job in jobs.items():
        _run(*job, "--check", "none")
        _run("verify", job[2])  # loads it in stock mlx-lm too
        row.cells[column] = f"pass, {parity.mean_kl(expected, _served(job[2], tokens)):.3f}"
    row.cells["stock"] = _stock(work)
    answer = _run("generate", work / "packed", "--prompt", PROMPT, "--max-tokens", NEW_TOKENS, "--json")
    row.cells["generate"] = "pass" if json.loads(answer)["new_tokens"] else "nothing"
    return row


def measure_companion(name: str, work: Path) -> str:
    """The row of one companion."""
    from tqtool.runtime.blas import ensure_blas

    ensure_blas()
    from tests.support import companion_parity as parity
    from tests.support.family_parity import mean_kl
    from tests.support.tiny_hybrid import write_with_companion

    family, tap = COMPANIONS[name]
    source = write_with_companion(work / "source", experts=family == "qwen3_5_moe")
    rotate = ("--rotate-weights", "--rotation-seed", SEED, "--mtp-tap", tap.removesuffix("_norm"))
    found = {}
    for form in ("dense", "8", "4"):
        _run("convert", source, work / form, *rotate, "--mtp", form, "--dtype", "float32", "--check", "none")
        _run("verify", work / form, "--check", "none")
        found[form] = parity.drafts(work / form)
    stated, own = (parity.expected(source, tap, is_folded=is_folded) for is_folded in (True, False))
    _run("convert", source, work / "q4", "-q", *rotate, "--mtp", "8", "--check", "none")
    from tests.support.stock import stock_generate

    answers = stock_generate([work / "q4"], PROMPT)
    cells = (
        f"{parity.exact_error(source, tap, seed=SEED):.0e}",
        f"{np.abs(found['dense'] - stated).max() / np.abs(stated).max():.0e}",
        f"{mean_kl(own, found['dense']):.3f}",
        *(f"pass, {mean_kl(found['dense'], found[form]):.4f}" for form in ("8", "4")),
        "pass" if all(answer["finite"] and answer["tokens"] for answer in answers.values()) else "not finite",
    )
    return f"{_companion_cells(name)} {' | '.join(cells)} |"


def _companion_cells(name: str) -> str:
    family, tap = COMPANIONS[name]
    return f"| `{family}` | `{tap}` |"


def _tokens(source: Path) -> list[int]:
    """The start of the text whose end calibrates."""
    from tqtool.runtime.load import load_tokenizer

    return list(load_tokenizer(source).encode(TEXT.read_text()[:SCORED]))


def _served(folder: Path, tokens: list[int]) -> Any:
    """Logits of an artifact as ``tqtool.load`` serves it, in float32."""
    import mlx.core as mx

    from tqtool.runtime.load import load

    logits = load(folder).model(mx.array(tokens)[None])[0]
    return np.array(logits.astype(mx.float32), np.float64)


def _stock(work: Path) -> str:
    from tests.support.stock import stock_generate

    answers = stock_generate([work / "q4", work / "fake"], PROMPT)
    return "pass" if all(answer["finite"] and answer["tokens"] for answer in answers.values()) else "not finite"


def _run(*arguments: Any) -> str:
    done = _tqtool(*arguments)
    if done.returncode:
        sys.exit(f"tqtool {' '.join(map(str, arguments))}\n{done.stderr}")
    return done.stdout


def _refused(*arguments: Any) -> str:
    """What the command line says on refusing, without the path."""
    done = _tqtool(*arguments)
    if not done.returncode:
        sys.exit(f"tqtool {' '.join(map(str, arguments))}: was not refused")
    return " ".join(done.stderr.split())


def _tqtool(*arguments: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "10000", "HF_HUB_OFFLINE": "1"}
    command = [*TQTOOL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


# ------------------------------------------------------------------------------------------------------------ page
def render(measured: dict[str, str], kept: list[str]) -> str:
    """The whole page: rows just measured, others as ``kept`` has them."""
    from tests.support.tiny_families import CASES

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlx-lm", "transformers"))
    lines = [HEAD.format(tools=f"With {versions}").rstrip(), ""]
    lines += [f"| case | family | what is special | {' | '.join(COLUMNS)} |", "|---" * (3 + len(COLUMNS)) + "|"]
    for name, case in CASES.items():
        old = [line for line in kept if line.startswith(_case_cells(name, case))]
        lines += [measured[name]] if name in measured else old
    lines += ["", COMPANION_HEAD, "", f"| trunk | hidden_tap | {' | '.join(COMPANION_COLUMNS)} |"]
    lines.append("|---" * (2 + len(COMPANION_COLUMNS)) + "|")
    for name in COMPANIONS:
        old = [line for line in kept if line.startswith(_companion_cells(name))]
        lines += [measured[name]] if name in measured else old
    lines += ["", "## Rotations that are refused", "", "The other verbs take the first group as it is.", ""]
    lines += refusal_lines()
    lines += ["", "## Settings that mlx-lm lacks or reads in its own way", ""]
    lines += setting_lines()
    return "\n".join(lines) + "\n"


def _case_cells(name: str, case: Any) -> str:
    return f"| {name} | `{case.model_type}` | {case.what} |"


def refusal_lines() -> list[str]:
    """A table row for each architecture that is refused, as the code says it now."""
    from tqtool.transform.families import FAMILIES, REFUSED_ROTATION

    known = {name: family.rotation_refusal for name, family in FAMILIES.items() if family.rotation_refusal}
    reasons: dict[tuple[str, str], list[str]] = {}
    for is_known, table in (("converts", known), ("not known", REFUSED_ROTATION)):
        for name, reason in table.items():
            reasons.setdefault((is_known, reason or ""), []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {verb} | {reason} |" for (verb, reason), names in reasons.items()]
    return ["| model_type | without rotation | why |", "|---|---|---|", *rows]


def setting_lines() -> list[str]:
    """A table row for each setting of a known family that is refused or warned of, as the code says it now."""
    from tqtool.source.mlx_lm import behaviour_warnings
    from tqtool.source.mlx_lm_settings import eight_bit_modules, setting_refusal
    from tqtool.transform.families import FAMILIES

    sizes = {"hidden_size": 3072, "num_attention_heads": 32, "max_position_embeddings": 131072}
    rope = {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    samples: list[dict[str, Any]] = [
        {"model_type": "qwen3", "attention_bias": True},
        *({"model_type": kind, "head_dim": 128} for kind in ("granite", "phi3", "qwen2")),
        *({"model_type": "phi3", "rope_scaling": {"type": kind, **rope}} for kind in ("yarn", "dynamic", "longrope")),
        {"model_type": "phi3", "sliding_window": 2047},
        {"model_type": "smollm3", "sliding_window": 2048, "use_sliding_window": True},
        {"model_type": "granite", "hidden_act": "gelu"},
    ]
    rows = []
    for sample in samples:
        refusal = setting_refusal(sizes | sample)
        said = (
            [f"refused: {refusal}"] if refusal else [f"warning: {line}" for line in behaviour_warnings(sizes | sample)]
        )
        what = ", ".join(f"{key} {_short(value)}" for key, value in sample.items() if key != "model_type")
        rows += [f"| `{sample['model_type']}` | {what} | {line} |" for line in said]
    for kind in FAMILIES:
        if globs := eight_bit_modules({"model_type": kind}):
            said = f"hint: mlx_lm.convert packs {', '.join(globs)} at 8 bits in any case; the rules that do the same"
            rows.append(f"| `{kind}` | `convert -q` | {said} |")
    return ["| model_type | config.json | what tqtool says |", "|---|---|---|", *rows]


def _short(value: Any) -> str:
    return f"of type {value['type']}" if isinstance(value, dict) else str(value).lower()


def page_problems(text: str) -> list[str]:
    """What the page lacks against the code; empty if it is complete."""
    from tests.support.tiny_families import CASES
    from tqtool.transform.families import FAMILIES

    missing = [name for name, case in CASES.items() if _case_cells(name, case) not in text]
    missing += [name for name in COMPANIONS if _companion_cells(name) not in text]
    problems = [f"{PAGE.name}: no row of case {name!r}" for name in missing]
    shown = {case.model_type for case in CASES.values()}
    problems += [f"tests/support/tiny_families.py: no case of {name!r}" for name in FAMILIES if name not in shown]
    problems += [f"{PAGE.name}: lacks {line!r}" for line in (*refusal_lines(), *setting_lines()) if line not in text]
    return [f"{problem}; run benchmarks/family_matrix.py --write" for problem in problems]


def _row_text(row: Row) -> str:
    cells = ", ".join(f"{column} {row.cells.get(column, '-')}" for column in COLUMNS)
    return f"{row.name}: {cells}" + (f"\n    {row.refusal}" if row.refusal else "")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="cases to run; default all")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--check", action="store_true", help="compare the page with the code and run nothing")
    parser.add_argument("--work", help="where temporary files go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
