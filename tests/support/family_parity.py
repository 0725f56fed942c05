"""Folded against source, in float64 and from the files in both stacks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_families import VOCAB, TinyFamily, apart, load_state, random_state, together, unstacked
from tqtool.runtime.blas import ensure_blas
from tqtool.transform.apply import apply_folds
from tqtool.transform.plan import TransformPlan, plan_rotation

TOKENS = [int(token) for token in np.random.default_rng(3).integers(3, VOCAB, 40)]

Logits = NDArray[np.float64]


def exact_error(case: TinyFamily, *, seed: int = 42, plan: TransformPlan | None = None) -> float:
    """Largest difference of float64 logits of transformers' model, folded against source, over the largest logit."""
    state, config = random_state(case), case.config().to_dict()
    plan, read = plan or rotation_of(case, seed=seed), apart(case, state).__getitem__
    folded = together(case, {piece.name: apply_folds(piece, read, dtype=np.float64) for piece in plan.pieces()})
    updated = CONFIG_MAPPING[case.model_type].from_dict(plan.updated_config(config))
    reference = logits64(load_state(case.config(), state, dtype=torch.float64))
    found = logits64(load_state(updated, folded, dtype=torch.float64))
    return float(np.abs(found - reference).max() / np.abs(reference).max())


def rotation_of(case: TinyFamily, *, seed: int = 42) -> TransformPlan:
    """The family's rotation of the model's parameters."""
    shapes = {name: array.shape for name, array in apart(case, random_state(case)).items()}
    return plan_rotation(shapes, case.config().to_dict(), seed=seed)


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
    with tempfile.TemporaryDirectory() as work:
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
