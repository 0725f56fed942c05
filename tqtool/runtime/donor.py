"""The dense weights of single modules of a folder whose others are never read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tqtool.errors import UserError
from tqtool.runtime.blas import ensure_blas
from tqtool.runtime.load import build_model, loading_config

if TYPE_CHECKING:
    import mlx.core as mx


class Donor:
    """A model built over lazily read weights; each module can be taken out once, and its packed weight goes with it."""

    def __init__(self, folder: Path) -> None:
        """Build the model of ``folder``; errors as ``load``."""
        ensure_blas()
        self._folder = folder
        self._model = build_model(folder, loading_config(folder))
        self._modules = dict(self._model.named_modules())

    def take(self, module: str, dtype: mx.Dtype) -> mx.array:
        """The weight of ``module`` in ``dtype``, computed as ``load(compute="expand")`` computes it.

        Raises:
            UserError: the model has no such module with a weight.
        """
        import mlx.core as mx
        import mlx.nn as nn
        from mlx.utils import tree_unflatten

        from tqtool.runtime.expand import dense_twin

        found = self._modules.pop(module, None)
        if found is None or "weight" not in found:
            raise UserError(f"{self._folder}: mlx-lm's model has no {module} with a weight")
        dense = dense_twin(found, dtype) or found
        weight: mx.array = dense.weight.astype(dtype)
        mx.eval(weight)
        self._model.update_modules(tree_unflatten([(module, nn.Identity())]))
        return weight
