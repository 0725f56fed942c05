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
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.oracles import decoder
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
    if case.is_nested:
        return nested_error(case, seed=seed, change=change)
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


def nested_error(case: TinyFamily, *, seed: int, change: Change | None) -> float:
    """The same by the dense decoder: transformers takes decays in float32, and cannot read what mlx-lm stores."""
    with TemporaryDirectory() as place:
        build(case).save_pretrained(place)
        tensors = {k: v.astype(np.float64) for k, v in load_file(Path(place) / "model.safetensors").items()}
        config = json.loads((Path(place) / "config.json").read_text())
    plan = plan_rotation({name: array.shape for name, array in tensors.items()}, config, seed=seed)
    plan = change(plan) if change is not None else plan
    folded = {piece.name: apply_folds(piece, tensors.__getitem__, dtype=np.float64) for piece in plan.pieces()}
    text = config["text_config"]
    flat = {**text, "model_type": config["model_type"]}
    flat["partial_rotary_factor"] = text["rope_parameters"]["partial_rotary_factor"]
    tokens = np.array(TOKENS)
    reference, found = decoder.forward(tensors, flat, tokens), decoder.forward(folded, flat, tokens)
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
    """Logits of the folder's model in float32, through transformers; through mlx-lm where only that can read it."""
    if json.loads((folder / "config.json").read_text())["model_type"].startswith("qwen3_5"):
        if any(name.startswith("language_model.") for name in load_file(folder / "model.safetensors")):
            return mlx_logits(folder, tokens)
        return _forward(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval(), tokens)
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
