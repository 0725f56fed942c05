"""mlx-lm's model run layer by layer on folded weights that come from the checkpoint as they are needed.

The folds are applied to the weights before they run, so what a module is seen to read is its input in the folded basis,
whatever the transform; nothing here knows of rotations. Only one layer's weights are alive, in float32.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map, tree_unflatten
from numpy.typing import NDArray

from tqtool.artifact.reload import decoder_layers
from tqtool.calibration.inputs import Seen
from tqtool.calibration.taps import Readers, Taps, put_taps
from tqtool.errors import UserError
from tqtool.runtime.layers import Stand
from tqtool.runtime.load import build_model
from tqtool.source.checkpoint import Checkpoint
from tqtool.transform.apply import apply_folds
from tqtool.transform.plan import OutputTensor, Role, TransformPlan

Array = NDArray[np.float32]


class StreamedModel:
    """A model whose layers are filled, run and emptied one at a time."""

    def __init__(self, checkpoint: Checkpoint, plan: TransformPlan) -> None:
        self._checkpoint = checkpoint
        self._outputs = {output.name: output for output in plan.outputs}
        # Not strict: the plan has every weight, also of sources whose spelling mlx-lm does not read.
        self._model = build_model(checkpoint.path, dict(checkpoint.config), strict=False)
        layers = decoder_layers(self._model)
        if layers is None:
            raise UserError(f"{checkpoint.path}: mlx-lm's {checkpoint.model_type} has no list of layers to calibrate")
        self._listed: list[Any] = layers
        self._layers: list[nn.Module] = list(layers)
        self._calls: dict[int, list[Stand]] = {}
        paths = {id(module): path for path, module in self._model.named_modules()}
        self._paths = [paths[id(layer)] for layer in self._layers]

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    def layer_outputs(self, index: int) -> tuple[OutputTensor, ...]:
        """The tensors of layer ``index``."""
        prefix = self._paths[index] + "."
        return tuple(output for name, output in self._outputs.items() if name.startswith(prefix))

    def begin(self, tokens: NDArray[np.uint32]) -> Array:
        """Hidden state ``[T, hidden]`` that ``tokens`` enter the first layer with."""
        hidden, calls = self._catch(tokens)
        self._calls.setdefault(tokens.size, calls)
        return hidden

    def fill(self, index: int) -> None:
        """Read and fold the weights of layer ``index``."""
        prefix = self._paths[index] + "."
        weights = [
            (output.name.removeprefix(prefix), mx.array(self._folded(output))) for output in self.layer_outputs(index)
        ]
        layer = self._layers[index]
        layer.load_weights(weights, strict=True)
        layer.eval()
        mx.eval(layer.parameters())

    def run(self, index: int, hidden: Array, seen: Seen | None = None) -> Array:
        """Layer ``index`` on one sequence ``[T, hidden]``; what its modules read is put into ``seen``."""
        call = self._call(index, hidden.shape[0])
        layer, taps = self._layers[index], Taps()
        take_off = put_taps(layer, self._paths[index], taps) if seen is not None else lambda: None
        try:
            result = layer(mx.array(hidden)[None], *call.arguments, **call.options)
            mx.eval(result, *taps.arrays())
        finally:
            take_off()
        if seen is not None:
            found = taps.seen()
            seen.dense, seen.routed = found.dense, found.routed
        return np.array(result[0])

    def readers(self, index: int, hidden: Array) -> Readers:
        """Who reads what in layer ``index``; ``hidden`` is any state that it can run on."""
        call = self._call(index, hidden.shape[0])
        layer, taps = self._layers[index], Taps()
        take_off = put_taps(layer, self._paths[index], taps)
        try:
            layer(mx.array(hidden)[None], *call.arguments, **call.options)
        finally:
            take_off()
        return taps.readers()

    def parts(self, stack: str) -> list[str]:
        """Modules of the experts in ``stack``, in order."""
        return [str(part.module) for part in self._outputs[f"{stack}.weight"].parts]

    def empty(self, index: int) -> None:
        """Forget the weights of layer ``index``."""
        self._layers[index].update(tree_map(lambda value: mx.zeros(0), self._layers[index].parameters()))

    def head_input(self, hidden: Array) -> Array:
        """What the head reads: the final norm of ``hidden``."""
        norm = next(output for name, output in self._outputs.items() if name.endswith("model.norm.weight"))
        module = self._model.model.norm
        module.load_weights([("weight", mx.array(apply_folds(norm, self._read)))], strict=True)
        result = module(mx.array(hidden))
        mx.eval(result)
        return np.array(result)

    def _call(self, index: int, length: int) -> Stand:
        if length not in self._calls:  # a resumed run enters in the middle
            self._calls[length] = self._catch(np.zeros(length, np.uint32))[1]
        return self._calls[length][index]

    def _catch(self, tokens: NDArray[np.uint32]) -> tuple[Array, list[Stand]]:
        """Run the model with layers that only note how they are called; nothing behind them is evaluated."""
        stands = [Stand(layer) for layer in self._layers]
        listed = self._listed
        embedding = next(output for output in self._outputs.values() if output.role is Role.EMBEDDING)
        stem = embedding.name.removesuffix(".weight")
        module = dict(self._model.named_modules())[stem]
        try:
            listed[:] = stands
            self._model.update_modules(tree_unflatten([(stem, _Rows(self._embed(embedding, tokens)))]))
            self._model(mx.array(tokens)[None])
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(f"{self._checkpoint.path}: mlx-lm cannot run this model ({reason})") from error
        finally:
            listed[:] = self._layers
            self._model.update_modules(tree_unflatten([(stem, module)]))
        hidden = stands[0].take_entering()
        mx.eval(hidden)
        return np.array(hidden.astype(mx.float32)[0]), stands

    def _embed(self, embedding: OutputTensor, tokens: NDArray[np.uint32]) -> mx.array:
        """Folded embedding rows ``[T, hidden]``, reading only those: folds of an embedding act on each row alone."""
        ref = self._checkpoint.tensors[embedding.source]
        unique, inverse = np.unique(tokens, return_inverse=True)
        rows = np.concatenate([ref.read_rows(int(token), int(token) + 1) for token in unique])
        wanted = replace(embedding, shape=rows.shape)
        folded = apply_folds(wanted, lambda name: rows if name == embedding.source else self._read(name))
        return mx.array(folded[inverse])

    def _folded(self, output: OutputTensor) -> Array:
        if not output.parts:
            return apply_folds(output, self._read)
        stack = np.empty(output.shape, np.float32)
        for index, part in enumerate(output.parts):
            stack[index] = apply_folds(part, partial(self._read, rows=part.rows))
        return stack

    def _read(self, name: str, rows: tuple[int, int] | None = None) -> NDArray[Any]:
        """A source tensor; ``rows`` of it, but for a norm gain, which is read whole."""
        ref = self._checkpoint.tensors[name]
        return ref.read() if rows is None or len(ref.shape) < 2 else ref.read_flat_rows(*rows)


class _Rows(nn.Module):  # type: ignore[misc]
    """Stands for the embedding of one sequence."""

    def __init__(self, rows: mx.array) -> None:
        super().__init__()
        self._rows = rows

    def __call__(self, tokens: mx.array) -> mx.array:
        return self._rows[None]

    def as_linear(self, hidden: mx.array) -> mx.array:
        """The head of a tied model; its result is thrown away."""
        return hidden
