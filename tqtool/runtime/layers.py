"""A loaded model run from any of its decoder layers on: what was before it is not computed again.

The model's own forward makes masks and positions, norms and the head; only its list of layers is another for one call.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from tqtool.artifact.reload import decoder_layers
from tqtool.errors import UserError


class Stand:
    """Stands for a layer in one call of the model: notes how it is called, and passes the hidden state on.

    Args:
        layer: Whose attributes the model sees.
        instead: Hidden state to take in place of the one that comes.
        runs: Run the layer on it.
    """

    def __init__(self, layer: Any, *, instead: mx.array | None = None, runs: bool = False) -> None:
        self.layer = layer
        self.arguments: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        self._instead, self._runs = instead, runs
        self._entering: mx.array | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, hidden: mx.array, *arguments: Any, **options: Any) -> mx.array:
        """What the layer, or nothing, makes of ``hidden`` or of ``instead``."""
        self.arguments, self.options = arguments, options
        self._entering = hidden if self._instead is None else self._instead
        return self.layer(self._entering, *arguments, **options) if self._runs else self._entering

    def take_entering(self) -> mx.array:
        """The hidden state that came; it is kept no longer."""
        assert self._entering is not None, "the model has run"
        entering, self._entering = self._entering, None
        return entering


class LayeredModel:
    """``model`` with its layers in reach. Hidden states are ``[1, T, hidden]``, tokens ``[1, T]``."""

    def __init__(self, model: nn.Module, name: str) -> None:
        """Find the layers of ``model``; UserError if mlx-lm's class keeps none in a list."""
        listed = decoder_layers(model)
        if listed is None:
            raise UserError(f"{name}: mlx-lm's class of this model has no list of layers")
        self._model, self._listed = model, listed
        self._layers: list[Any] = list(listed)
        self._paths = {id(module): path for path, module in model.named_modules()}

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    def layer_of(self, module: str) -> int | None:
        """The layer that ``module`` lies in, or None."""
        owners = (index for index, layer in enumerate(self._layers) if module.startswith(self._paths[id(layer)] + "."))
        return next(owners, None)

    def enter(self, tokens: mx.array) -> mx.array:
        """The hidden state that ``tokens`` enter the first layer with."""
        stands = [Stand(layer) for layer in self._layers]
        self._call(tokens, stands)
        return stands[0].take_entering()

    def step(self, index: int, hidden: mx.array, tokens: mx.array) -> mx.array:
        """What layer ``index`` makes of ``hidden``."""
        stands = [Stand(layer) for layer in self._layers]
        self._call(tokens, stands)
        call = stands[index]
        left: mx.array = call.layer(hidden, *call.arguments, **call.options)
        return left

    def finish(self, index: int, hidden: mx.array, tokens: mx.array) -> mx.array:
        """Logits ``[1, T, vocabulary]`` of ``hidden`` through the layers from ``index`` on, which may be none."""
        first = Stand(self._layers[min(index, self.depth - 1)], instead=hidden, runs=index < self.depth)
        before = [Stand(layer) for layer in self._layers[: min(index, self.depth - 1)]]
        return self._call(tokens, [*before, first, *self._layers[index + 1 :]])

    def _call(self, tokens: mx.array, layers: list[Any]) -> mx.array:
        try:
            self._listed[:] = layers
            logits: mx.array = self._model(tokens)
        finally:
            self._listed[:] = self._layers
        return logits
