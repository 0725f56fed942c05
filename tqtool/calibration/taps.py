"""Taps on one layer of mlx-lm: every linear keeps its input, every block of experts what each of them reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import SwitchGLU

from tqtool.calibration.inputs import RoutedRows, Seen
from tqtool.errors import UserError


@dataclass(slots=True)
class _Routed:
    """One call of a block of experts: indices ``[…, k]``, and what down_proj was called with."""

    indices: mx.array
    inner: mx.array | None = None
    order: mx.array | None = None
    is_sorted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """First reader of each distinct input → all linears that read it; each block of experts → who reads the same."""

    dense: Mapping[str, list[str]]
    routers: Mapping[str, str | None]


@dataclass(slots=True)
class Taps:
    """Module path → its input. Of a block of experts its own, and how it was routed."""

    inputs: dict[str, mx.array] = field(default_factory=dict)
    routed: dict[str, _Routed] = field(default_factory=dict)

    def arrays(self) -> list[mx.array]:
        """All that has to be evaluated."""
        found = list(self.inputs.values())
        for call in self.routed.values():
            found += [array for array in (call.indices, call.inner, call.order) if array is not None]
        return found

    def groups(self) -> list[list[str]]:
        """Modules that read one and the same array, in the order they were called."""
        found: dict[int, list[str]] = {}
        for module, value in self.inputs.items():
            found.setdefault(id(value), []).append(module)
        return list(found.values())

    def readers(self) -> Readers:
        """Who reads what, in the order they were called."""
        dense: dict[str, list[str]] = {}
        routers: dict[str, str | None] = dict.fromkeys(self.routed)
        for modules in self.groups():
            linears = [module for module in modules if module not in self.routed]
            if linears:
                dense[linears[0]] = linears
                routers.update((module, linears[0]) for module in modules if module in self.routed)
        return Readers(dense=dense, routers=routers)

    def seen(self) -> Seen:
        """Rows of every distinct input, under the first linear that reads it, and of every stack of experts."""
        result = Seen()
        for first in self.readers().dense:
            result.dense[first] = _rows(self.inputs[first])
        for path, call in self.routed.items():
            outer, inner = _routed_rows(path, self.inputs[path], call)
            result.routed[f"{path}.gate_proj"] = outer
            result.routed[f"{path}.down_proj"] = inner
        return result


def put_taps(layer: nn.Module, path: str, taps: Taps) -> Callable[[], None]:
    """Put a tap on every linear and block of experts of ``layer``; call the result to take them off."""
    modules = layer.named_modules()
    linears = [(name, module) for name, module in modules if type(module) is nn.Linear]
    blocks = [(name, module) for name, module in modules if type(module) is SwitchGLU]
    downs = [(block, block.down_proj) for _, block in blocks]
    tapped = [(name, _LinearTap(module, f"{path}.{name}", taps)) for name, module in linears]
    tapped += [(name, _BlockTap(block, f"{path}.{name}", taps)) for name, block in blocks]
    layer.update_modules(tree_unflatten(tapped))

    def take_off() -> None:
        for block, down in downs:
            block.down_proj = down
        layer.update_modules(tree_unflatten([*linears, *blocks]))

    return take_off


class _LinearTap(nn.Module):  # type: ignore[misc]
    """A linear layer that keeps its input."""

    def __init__(self, linear: nn.Module, module: str, taps: Taps) -> None:
        super().__init__()
        self.linear = linear
        self._module, self._taps = module, taps

    def __call__(self, x: mx.array) -> mx.array:
        self._taps.inputs[self._module] = x
        result: mx.array = self.linear(x)
        return result


class _BlockTap(nn.Module):  # type: ignore[misc]
    """A block of experts that keeps its input, its routing and what its down_proj reads."""

    def __init__(self, block: nn.Module, module: str, taps: Taps) -> None:
        super().__init__()
        self._module, self._taps = module, taps
        block.down_proj = _DownTap(block.down_proj, module, taps)
        self.block = block

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self._taps.inputs[self._module] = x
        self._taps.routed[self._module] = _Routed(indices=indices)
        result: mx.array = self.block(x, indices)
        return result


class _DownTap(nn.Module):  # type: ignore[misc]
    """The stack that writes the experts' results."""

    def __init__(self, stack: nn.Module, module: str, taps: Taps) -> None:
        super().__init__()
        self.stack = stack
        self._module, self._taps = module, taps

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        call = self._taps.routed[self._module]
        call.inner, call.order, call.is_sorted = x, indices, sorted_indices
        result: mx.array = self.stack(x, indices, sorted_indices=sorted_indices)
        return result


def _routed_rows(path: str, x: mx.array, call: _Routed) -> tuple[RoutedRows, RoutedRows]:
    """What gate and up read of a sequence, and what down reads of it."""
    indices = np.array(call.indices, np.int32).reshape(-1, call.indices.shape[-1])
    outer, top = _rows(x), indices.shape[1]
    positions = np.arange(len(outer), dtype=np.int32)
    assert call.inner is not None, "the block was run"
    inner, read = _rows(call.inner), np.array(call.order, np.int32).reshape(-1)
    places = np.arange(indices.size, dtype=np.int32)
    if call.is_sorted:  # mlx-lm orders many rows by expert; by what else, its own sort of the same array says
        places = np.array(mx.argsort(call.indices.flatten()), np.int32)
    if len(outer) != len(indices) or len(inner) != indices.size or (indices.reshape(-1)[places] != read).any():
        raise UserError(
            f"{path}: mlx-lm hands the rows of a sequence to its experts in an unknown order",
            hint="calibrate with the mlx-lm version that tqtool names in constraints.txt",
        )
    return (
        RoutedRows(rows=outer, experts=indices, tokens=positions),
        RoutedRows(rows=inner, experts=read[:, None], tokens=places // top),
    )


def _rows(value: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(value.astype(mx.float32)).reshape(-1, value.shape[-1])
