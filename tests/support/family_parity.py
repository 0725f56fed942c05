"""Folded against source, in float64 and from the files in both stacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_families import ONE_BY_ONE, VOCAB, TinyFamily, build, unstacked
from tqtool.runtime.blas import ensure_blas
from tqtool.transform.apply import apply_folds
from tqtool.transform.plan import TransformPlan, plan_rotation

TOKENS = [int(token) for token in np.random.default_rng(3).integers(3, VOCAB, 40)]

Logits = NDArray[np.float64]
Change = Callable[[TransformPlan], TransformPlan]


def exact_error(case: TinyFamily, *, seed: int = 42, change: Change | None = None) -> float:
    """Largest difference of float64 logits of transformers' model, folded against source, over the largest logit.

    Both go through files, so that the tensors have the names they have on disk. ``change`` plants a fault in the plan.
    """
    with TemporaryDirectory() as place:
        source, folded = Path(place) / "source", Path(place) / "folded"
        model = build(case, dtype=torch.float64)
        model.save_pretrained(source)
        tensors = load_file(source / "model.safetensors")
        config = json.loads((source / "config.json").read_text())
        plan = plan_rotation({name: array.shape for name, array in tensors.items()}, config, seed=seed)
        plan = change(plan) if change is not None else plan
        folded.mkdir()
        outputs = {piece.name: apply_folds(piece, tensors.__getitem__, dtype=np.float64) for piece in plan.pieces()}
        save_file(outputs, folded / "model.safetensors", metadata={"format": "pt"})
        (folded / "config.json").write_text(json.dumps(plan.updated_config(config)))
        reference = logits64(model)
        found = logits64(AutoModelForCausalLM.from_pretrained(folded, dtype=torch.float64, **ONE_BY_ONE).eval())
    return float(np.abs(found - reference).max() / np.abs(reference).max())


def logits64(model: PreTrainedModel) -> Logits:
    """Logits ``[T, vocab]``; its norms, which round to float32 inside, are replaced by ones that do not."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], _Norm64(module))
    return _forward(model)


class _Norm64(torch.nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def transformers_logits(folder: Path, tokens: list[int] = TOKENS) -> Logits:
    """Logits of the folder's model in float32, through transformers."""
    with TemporaryDirectory() as work:
        plain = unstacked(folder, Path(work) / "apart")
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    return _forward(model, tokens)


def mlx_logits(folder: Path, tokens: list[int] = TOKENS) -> Logits:
    """Logits of the folder's model in float32, through stock mlx-lm."""
    ensure_blas()
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model

    model, _ = load_model(folder, strict=True)
    model.update(tree_map(lambda array: array.astype(mx.float32), model.parameters()))
    return np.array(model(mx.array(tokens)[None])[0].astype(mx.float32), np.float64)


def _forward(model: PreTrainedModel, tokens: list[int] = TOKENS) -> Logits:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double().numpy()


def mean_kl(source: Logits, other: Logits) -> float:
    """Mean of KL(source ‖ other) over positions, nats."""
    p, q = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (source, other))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())
