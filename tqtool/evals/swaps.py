"""KL of a loaded model with some weights exchanged, computed from the layer they lie in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import UserError
from tqtool.evals.kl import check_tokenizer, check_width, score_window
from tqtool.evals.logits import computed
from tqtool.formats.teacher import TeacherDump
from tqtool.runtime.load import LoadedModel

if TYPE_CHECKING:
    import mlx.core as mx


class SwapScorer:
    """Walks down the layers of a model; at each, weights of that layer can be exchanged and the rest be run.

    Memory: the hidden states of all windows at one layer, ``4 · hidden`` bytes a token, and the logits of two windows.
    """

    def __init__(self, loaded: LoadedModel, dump: TeacherDump, windows: int) -> None:
        """Enter the first layer with ``windows`` windows of ``dump``; UserError where ``loaded`` does not fit it."""
        import mlx.core as mx

        from tqtool.runtime.layers import LayeredModel

        check_tokenizer(loaded, dump)
        check_width(loaded, dump)
        self._dump = dump
        self._model = LayeredModel(loaded.model, str(loaded.report.path))
        self._modules = dict(loaded.model.named_modules())
        self._tokens = [mx.array(dump.tokens(index)[None, :-1]) for index in range(windows)]
        self._states = [self._model.enter(tokens) for tokens in self._tokens]
        mx.eval(self._states)
        self.layer = 0

    @property
    def depth(self) -> int:
        """Number of layers: there the head is all that is left."""
        return self._model.depth

    def layer_of(self, module: str) -> int:
        """The layer that ``module`` must be exchanged at; UserError if it is no dense layer of the model."""
        layer = self._model.layer_of(module)
        found = self._modules.get(module)
        if found is None or "weight" not in found or "scales" in found:
            raise UserError(f"{module}: no layer of this model that can be expanded and exchanged")
        if layer is None and not module.endswith("lm_head"):
            raise UserError(f"{module}: lies in no layer of the model")
        return self.depth if layer is None else layer

    def dtype_of(self, module: str) -> mx.Dtype:
        """What a weight of ``module`` must be."""
        dtype: mx.Dtype = self._modules[module].weight.dtype
        return dtype

    def advance(self) -> None:
        """Go to the next layer."""
        import mlx.core as mx

        for index, tokens in enumerate(self._tokens):
            self._states[index] = self._model.step(self.layer, self._states[index], tokens)
            mx.eval(self._states[index])
        self.layer += 1

    def score(self) -> NDArray[np.float64]:
        """KL of every position, ``[windows, positions]``, the model run from the present layer on."""
        steps = zip(self._states, self._tokens, strict=True)
        logits = computed(self._model.finish(self.layer, hidden, tokens) for hidden, tokens in steps)
        return np.stack([score_window(index, self._dump.window(index), each).kl for index, each in enumerate(logits)])

    @contextmanager
    def exchanged(self, weights: Mapping[str, mx.array]) -> Iterator[None]:
        """``weights`` by module, in place of the model's own inside the block."""
        own = {module: self._modules[module].weight for module in weights}
        try:
            exchange(self._modules, weights)
            yield
        finally:
            exchange(self._modules, own)


def exchange(modules: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    """Give each module its weight; UserError where the shapes differ."""
    for module, weight in weights.items():
        own = modules[module].weight.shape
        if own != weight.shape:
            raise UserError(f"{module}: {list(own)} in one artifact, {list(weight.shape)} in the other")
        modules[module].weight = weight
