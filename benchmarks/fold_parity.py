"""Does folding change what a real model says? Folded bf16 against its source, both through stock mlx-lm.

    python benchmarks/fold_parity.py SRC [--text FILE --windows 2 --tokens 512 --seed 42 --folded DIR --json]

The source is converted with the rotation and without quantization (unless ``--folded`` names a folder that is already
there), both folders are loaded strictly by ``mlx_lm.utils.load_model``, cast to float32 and run on the same windows.
Printed: mean and maximum KL(source ‖ folded) per position over the whole vocabulary (nats, float64 sums), and every
position whose most likely token changes, with the margin the source had between the two. Only the rounding of the
folded weights to bf16 should remain, so ``--float32`` (store the folded weights in float32) is the control.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.runtime.blas import ensure_blas

ROWS = 64  # positions per float64 step: 64 rows of a 152k vocabulary are 78 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A position where the most likely token changed; margins in logits, never negative."""

    window: int
    position: int
    source_token: str
    folded_token: str
    source_margin: float
    folded_margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Result of one comparison; KL in nats per position."""

    source: str
    plan: str
    stored: str
    seed: int
    text: str
    windows: int
    tokens: int
    positions: int
    mean_kl: float
    kl_standard_error: float
    max_kl: float
    max_logit_difference: float
    flip_count: int
    flips: list[Flip]
    elapsed_s: float


def main() -> None:
    options = _options()
    blas = ensure_blas()
    sys.stderr.write(f"BLAS: {blas.status} ({blas.library})\n")
    result = measure(options)
    if options.json:
        print(json.dumps(asdict(result), indent=1))
    else:
        _print_table(result)
    if options.limit is not None and result.mean_kl > options.limit:
        sys.exit(f"mean KL {result.mean_kl:.3g} is above the limit {options.limit:.3g}")


def measure(options: argparse.Namespace) -> Parity:
    """Fold, run both models on the same windows, compare. Memory: both models in float32 one after the other."""
    started = time.perf_counter()
    source = Path(options.source)
    with tempfile.TemporaryDirectory(dir=options.work) as scratch:
        if options.folded:
            folded, plan = Path(options.folded), "given"
        else:
            folded, plan = Path(scratch) / "folded", ""
            plan = _fold(source, folded, seed=options.seed, dtype="float32" if options.float32 else "bfloat16")
        tokenizer = _tokenizer(source)
        windows = _windows(tokenizer, Path(options.text), options.windows, options.tokens)
        reference = Path(scratch) / "logits.npy"
        np.save(reference, np.stack([_logits(model, w) for model in [_load(source)] for w in windows]))
        kept = np.load(reference, mmap_mode="r")
        model = _load(folded)
        scores = [_compare(i, kept[i], _logits(model, window), tokenizer) for i, window in enumerate(windows)]
    kl = np.concatenate([score[0] for score in scores])
    flips = [flip for score in scores for flip in score[2]]
    return Parity(
        source=source.name,
        plan=plan,
        stored="float32" if options.float32 else "bfloat16",
        seed=options.seed,
        text=Path(options.text).name,
        windows=len(windows),
        tokens=options.tokens,
        positions=kl.size,
        mean_kl=float(kl.mean()),
        kl_standard_error=float(kl.std(ddof=1) / np.sqrt(kl.size)),
        max_kl=float(kl.max()),
        max_logit_difference=max(score[1] for score in scores),
        flip_count=len(flips),
        flips=sorted(flips, key=lambda flip: -flip.source_margin),
        elapsed_s=time.perf_counter() - started,
    )


def _fold(source: Path, out: Path, *, seed: int, dtype: str) -> str:
    from tqtool.formats.dtypes import DType
    from tqtool.pipeline.convert import ConvertRequest, plan_convert

    stored = DType.F32 if dtype == "float32" else DType.BF16
    job = plan_convert(ConvertRequest(source=str(source), out=out, rotation_seed=seed, dtype=stored))
    job.run()
    return str(json.loads((out / "tqtool" / "manifest.json").read_text())["transforms"][0]["id"])


def _load(folder: Path) -> Any:
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(folder, strict=True)
    model.update(tree_map(lambda array: array.astype(mx.float32), model.parameters()))
    mx.eval(model.parameters())
    return model


def _logits(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    import mlx.core as mx

    sys.stderr.write(".")
    sys.stderr.flush()
    return np.array(model(mx.array(tokens)[None])[0].astype(mx.float32))


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _windows(tokenizer: Any, text: Path, count: int, length: int) -> list[list[int]]:
    ids = tokenizer.encode(text.read_text()[: 12 * count * length], add_special_tokens=False).ids
    if len(ids) < count * length:
        sys.exit(f"{text}: {len(ids)} tokens, {count * length} wanted")
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def _compare(
    window: int, source: NDArray[np.float32], folded: NDArray[np.float32], tokenizer: Any
) -> tuple[NDArray[np.float64], float, list[Flip]]:
    kl, largest = [], 0.0
    for start in range(0, len(source), ROWS):
        p, q = (side[start : start + ROWS].astype(np.float64) for side in (source, folded))
        largest = max(largest, float(np.abs(p - q).max()))
        p -= _log_sum_exp(p)
        q -= _log_sum_exp(q)
        kl.append((np.exp(p) * (p - q)).sum(axis=1))
    first, second = source.argmax(axis=1), folded.argmax(axis=1)
    flips = [
        Flip(
            window=window,
            position=int(t),
            source_token=tokenizer.decode([int(first[t])]),
            folded_token=tokenizer.decode([int(second[t])]),
            source_margin=float(source[t, first[t]] - source[t, second[t]]),
            folded_margin=float(folded[t, second[t]] - folded[t, first[t]]),
        )
        for t in np.flatnonzero(first != second)
    ]
    return np.concatenate(kl), largest, flips


def _log_sum_exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    top = x.max(axis=1, keepdims=True)
    return top + np.log(np.exp(x - top).sum(axis=1, keepdims=True))


def _print_table(result: Parity) -> None:
    share = 100 * result.flip_count / result.positions
    print(f"{result.source}, {result.plan} seed {result.seed}, stored {result.stored}")
    print(f"{result.windows} x {result.tokens} tokens of {result.text}, {result.elapsed_s:.0f} s")
    print(f"mean KL {result.mean_kl:.3e} +- {result.kl_standard_error:.1e}   max KL {result.max_kl:.3e}")
    print(f"largest logit difference {result.max_logit_difference:.4f}")
    print(f"{result.flip_count} argmax flips of {result.positions} ({share:.2f} %), largest source margin first:")
    for flip in result.flips:
        where = f"window {flip.window} position {flip.position:4d}"
        what = f"{flip.source_token!r:>14} -> {flip.folded_token!r:<14}"
        print(f"  {where}  {what} margin {flip.source_margin:.4f} (folded {flip.folded_margin:.4f})")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder of a model that stock mlx-lm loads")
    parser.add_argument("--text", required=True, help="UTF-8 text; the windows are its start")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per window")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--folded", help="a folded folder to compare instead of making one")
    parser.add_argument("--float32", action="store_true", help="store the folded weights in float32: the control")
    parser.add_argument("--limit", type=float, help="exit 1 if the mean KL is above")
    parser.add_argument("--work", help="where temporary files go")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
