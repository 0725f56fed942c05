"""Stock mlx-lm in processes of its own: it changes limits at import and must not see tqtool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_CONVERT = """
import json, sys
from mlx_lm.convert import convert
for source, out, options in json.loads(sys.argv[1]):
    convert(source, out, **options)
"""
_GENERATE = """
import json, sys
if sys.argv[3] == "blas":
    from tqtool.runtime.blas import ensure_blas
    ensure_blas()
import mlx.core as mx
from mlx_lm import load, stream_generate
answers = {}
for path in json.loads(sys.argv[1]):
    model, tokenizer = load(path)
    prompt = json.loads(sys.argv[2])
    if isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    logits = model(mx.array([prompt])).astype(mx.float32)
    pieces = list(stream_generate(model, tokenizer, prompt, max_tokens=12))
    answers[path] = {
        "tokens": [piece.token for piece in pieces],
        "text": "".join(piece.text for piece in pieces),
        "last_logits": logits[0, -1].tolist(),
        "finite": bool(mx.isfinite(logits).all().item()),
        "eos": sorted(tokenizer.eos_token_ids),
        "template": tokenizer.chat_template is not None,
    }
print("ANSWER" + json.dumps(answers))
"""

# Every way to tqtool is closed before anything is imported; mlx-lm's own command answers.
_PACKED = """
import contextlib, io, json, sys
sys.modules["tqtool"] = None
import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import main
answers = {}
for path in json.loads(sys.argv[1]):
    said = io.StringIO()
    sys.argv = ["mlx_lm.generate", "--model", path, "--prompt", "w5 w6", "--max-tokens", "6", "--trust-remote-code"]
    with contextlib.redirect_stdout(said):
        main()
    model, _ = load(path, trust_remote_code=True)
    model.set_dtype(mx.float32)
    logits = model(mx.array([TOKENS]))[0]
    kinds = sorted({type(module).__name__ for _, module in model.named_modules() if "Trellis" in type(module).__name__})
    answers[path] = {"said": said.getvalue(), "logits": logits.tolist(), "kinds": kinds}
assert not [name for name in sys.modules if name.startswith("tqtool.")]
print("ANSWER" + json.dumps(answers))
"""
PACKED_TOKENS = [5, 9, 31, 7, 7, 200, 3, 11]


def _run(script: str, *arguments: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def stock_convert(jobs: list[tuple[Path, Path, dict[str, Any]]]) -> None:
    """``mlx_lm.convert`` each of ``(source, out, options)``, all in one process."""
    _run(_CONVERT, json.dumps([(str(source), str(out), options) for source, out, options in jobs]))


def stock_generate(folders: list[Path], prompt: str | list[int], *, blas: bool = True) -> dict[Path, dict[str, Any]]:
    """Load each folder with ``mlx_lm.load`` and generate greedily; ``prompt`` is a chat message or token ids."""
    paths = json.dumps([str(folder) for folder in folders])
    out = _run(_GENERATE, paths, json.dumps(prompt), "blas" if blas else "plain")
    answers = json.loads(out.split("ANSWER")[1])
    return {Path(path): answer for path, answer in answers.items()}


def stock_packed(folders: list[Path]) -> dict[Path, dict[str, Any]]:
    """Run ``mlx_lm.generate --trust-remote-code`` on packed artifacts where tqtool cannot be imported.

    ``said`` is what it printed, ``logits`` those of ``PACKED_TOKENS`` in float32, ``kinds`` the classes of
    trellis layers.
    """
    script = _PACKED.replace("TOKENS", json.dumps(PACKED_TOKENS))
    answers = json.loads(_run(script, json.dumps([str(folder) for folder in folders])).split("ANSWER")[1])
    return {Path(path): answer for path, answer in answers.items()}
