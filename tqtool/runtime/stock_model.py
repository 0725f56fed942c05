"""Run a packed trellis artifact inside stock mlx-lm; shipped in it as ``tqtool_model.py``.

``config.json`` names this file in ``model_file``, so ``mlx_lm ... --trust-remote-code`` builds the model
from here and refuses without the flag. ``Model(args)`` is mlx-lm's own class for ``config["model_type"]``
with the linear layers listed in ``config["trellis"]["modules"]`` replaced by ``TrellisLinear`` (stacks of experts by
``TrellisExperts``). They decode with MLX's array operations, so they run wherever MLX does. Where GPU kernels are in
use (NVIDIA cards of compute capability 9.0; Apple's GPUs with ``TQTOOL_METAL_KERNELS=1`` in the environment, as no
Apple GPU has run them yet) layers that go through them take their place. The kernels and the Python that launches
them stand at the end of the shipped file, as ``tqtool.artifact.model_file`` put them there. The file depends on what
mlx-lm depends on: mlx, mlx_lm and numpy.

Format versions 1 and 2. ``weight`` is a stream of uint32 words: the stored matrix [rows, stride] in row-major
order (``cols`` values used in each row), cut into blocks of T values, T·k bits each; or, with ``tile`` 16, cut into
squares of 16 × 16 that follow one another along the columns. Value t of a block owns
the bit offset (T-1-t)·k; the L bits from there on, wrapping inside the block, little-endian in the words,
are its state. Weight = f32(code(state)) · f32(scale[row]). Axis 1 stores [out, in], axis 0 [in, out].
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import _get_classes

FORMAT_VERSIONS = (1, 2)
CHUNK_WEIGHTS = 1 << 22
"""Weights decoded at a time: bounds the temporaries at about 100 MB whatever the layer."""

BYTE_SUM_CODES = {
    "mul1": (0x83DCD12D, 0, 147.7),
    "1mad": (34038481, 76625530, 147.800537109375),
}
"""Multiplier, addend, unit: x = state·multiplier + addend mod 2^32, value (byte sum of x - 510)·f32(1/unit)."""

CARRIED: dict[str, str] = {}
"""Filled at the end of the shipped file: Python modules by name, in the order of their imports; kernels by file."""
CARRIED_ROOT = ""
"""Package that the carried modules belong to: its name holds their hash, so that versions do not mix."""


class ModelArgs:
    """What mlx-lm hands from ``config.json`` to ``Model``. No dataclass: mlx-lm runs this file as no module."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelArgs:
        """Keep the whole configuration; the stock class picks its own fields from it later."""
        return cls(config)


def Model(  # noqa: N802
    args: ModelArgs,
    layer_class: type[TrellisLinear] | None = None,
    experts_class: type[TrellisExperts] | None = None,
) -> nn.Module:
    """mlx-lm's model for ``args.config`` with its trellis layers in place; weights are loaded afterwards.

    Named as mlx-lm wants it. ``layer_class`` and ``experts_class`` are the classes of trellis layers and of stacks of
    them, by default those of the default device.
    Raises ValueError for an unknown format version, a path that is no ``nn.Linear``, a shape that disagrees.
    """
    model_class, args_class = _get_classes(args.config)
    model = model_class(args_class.from_dict(args.config))
    trellis = args.config["trellis"]
    if trellis.get("format_version") not in FORMAT_VERSIONS:
        found = trellis.get("format_version")
        raise ValueError(f"trellis format_version: expected 1 or 2, found {found!r}")

    is_ours = layer_class is None
    layer_class = layer_class or layer_class_here()
    experts_class = experts_class or type("TrellisExperts", (TrellisExperts,), {"layer_class": layer_class})
    linears = dict(model.named_modules())
    codes: dict[tuple[str, int], mx.array | None] = {}
    layers = []
    for path, spec in trellis["modules"].items():
        key = (spec["code"], spec["window"])
        if key not in codes:
            codes[key] = code_values(*key)
        if "experts" in spec:
            layer = _experts_for(path, linears.get(path), spec, codes[key], experts_class)
        else:
            layer = _layer_for(path, linears.get(path), spec, codes[key], layer_class)
        layers.append((path, layer))
    model.update_modules(tree_unflatten(layers))
    if is_ours and layer_class is not TrellisLinear:
        carried("runtime.gated_mlp").fuse_gates(model)  # gate and up in one launch where a kernel does both
    return model


def _layer_for(
    path: str, linear: object, spec: dict[str, Any], codes: mx.array | None, layer_class: type[TrellisLinear]
) -> TrellisLinear:
    if not isinstance(linear, nn.Linear):
        raise ValueError(f"trellis module {path}: expected a Linear layer, found {type(linear).__name__}")
    layer = layer_class(spec, bias="bias" in linear, codes=codes)
    expected, found = list(linear.weight.shape), list(layer.logical_shape)
    if expected != found:
        raise ValueError(f"trellis module {path}: expected [out, in] = {expected}, its spec says {found}")
    return layer


def _experts_for(
    path: str, stack: object, spec: dict[str, Any], codes: mx.array | None, experts_class: type[TrellisExperts]
) -> TrellisExperts:
    if not isinstance(stack, SwitchLinear) or "bias" in stack:
        raise ValueError(f"trellis module {path}: expected experts without bias, found {type(stack).__name__}")
    layer = experts_class(spec, codes=codes)
    expected, found = list(stack.weight.shape), [spec["experts"], *layer.expert(0).logical_shape]
    if expected != found:
        raise ValueError(f"trellis module {path}: expected [experts, out, in] = {expected}, its spec says {found}")
    return layer


def layer_class_here() -> type[TrellisLinear]:
    """The class for the default device: through carried kernels where they are in use, else ``TrellisLinear``."""
    if not CARRIED or mx.default_device().type == mx.cpu:
        return TrellisLinear
    backend = carried("kernels.device").backend_of(mx.default_device())
    if backend is None:
        return TrellisLinear
    made: type[TrellisLinear] = carried("runtime.gpu_linear").kernel_layer(backend)
    return made


def carried(name: str) -> ModuleType:
    """The carried module ``name``; the first call makes all of them."""
    if f"{CARRIED_ROOT}.{name}" not in sys.modules:
        ours = sys.modules[f"{CARRIED_ROOT}.runtime.stock_model"] = ModuleType(f"{CARRIED_ROOT}.runtime.stock_model")
        ours.__dict__.update(TrellisLinear=TrellisLinear, TrellisExperts=TrellisExperts)
        for each, text in CARRIED.items():
            if "/" in each:
                continue
            module = sys.modules[f"{CARRIED_ROOT}.{each}"] = ModuleType(f"{CARRIED_ROOT}.{each}")
            exec(compile(text, f"{__file__}: {each}", "exec"), module.__dict__)
        texts = {file: text for file, text in CARRIED.items() if "/" in file}
        sys.modules[f"{CARRIED_ROOT}.kernels.sources"].CARRIED.update(texts)
    return sys.modules[f"{CARRIED_ROOT}.{name}"]


class TrellisLinear(nn.Module):  # type: ignore[misc]
    """A linear layer whose weight is a bitshift-trellis stream, decoded on the fly.

    Parameters: ``weight`` uint32 words, ``scales`` float16 [rows], ``bias`` [out] if the layer has one, and
    ``table`` float32 [2^L] for a code without a formula here (``codes`` is None).
    """

    def __init__(self, spec: dict[str, Any], *, bias: bool, codes: mx.array | None):
        super().__init__()
        self.spec = dict(spec)
        k, window, block = spec["k"], spec["window"], spec["block"]
        if not 1 <= k < window <= 16 or block * k < 32 or block * k % 32:
            raise ValueError(f"trellis spec k={k}, window={window}, block={block}: not decodable")
        axis, cols, stride = spec["axis"], spec["cols"], spec["stride"]
        if axis not in (0, 1) or cols > stride:
            raise ValueError(f"trellis spec axis={axis}, cols={cols}, stride={stride}: not decodable")
        tile = self.spec.setdefault("tile", 0)
        if tile and (axis != 1 or tile * tile != block or stride % tile):
            raise ValueError(f"trellis spec tile={tile}, axis={axis}, stride={stride}: not decodable")
        self.weight = mx.zeros(words_shape(spec), mx.uint32)
        self.scales = mx.zeros((spec["rows"],), mx.float16)
        if codes is None:
            self.table = mx.zeros((1 << window,), mx.float32)
        else:
            self._codes = codes
        if bias:
            self.bias = mx.zeros((self.logical_shape[0],))
        self.freeze()

    @property
    def logical_shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, cols = self.spec["rows"], self.spec["cols"]
        return (cols, rows) if self.spec["axis"] == 0 else (rows, cols)

    def decode_rows(self, start: int, stop: int) -> mx.array:
        """Weights of the stored rows [start, stop), float32 [stop - start, cols]; start on a tile if any."""
        k, window, block = self.spec["k"], self.spec["window"], self.spec["block"]
        stride, cols, tile = self.spec["stride"], self.spec["cols"], self.spec["tile"]
        words_per_block = block * k // 32
        coded = -(-stop // tile) * tile if tile else stop
        first, last = start * stride // block, -(-coded * stride // block)
        words = self.weight.reshape(-1)[first * words_per_block : last * words_per_block]
        words = words.reshape(last - first, words_per_block)

        bit = (block - 1 - mx.arange(block)) * k
        word, shift = bit // 32, (bit % 32).astype(mx.uint32)
        low = mx.take(words, word, axis=1) >> shift
        # Two steps: a shift by 32 is undefined, and shift = 0 must contribute nothing.
        high = (mx.take(words, (word + 1) % words_per_block, axis=1) << 1) << (31 - shift)
        state = (low | high) & ((1 << window) - 1)

        values = mx.take(self.table if "table" in self else self._codes, state)
        if tile:
            values = values.reshape(-1, stride // tile, tile, tile).swapaxes(1, 2)
        values = values.reshape(-1)
        begin = start * stride - first * block  # 0 in tiles, whose values are rows again by now
        values = values[begin : begin + (stop - start) * stride].reshape(stop - start, stride)
        return values[:, :cols] * self.scales[start:stop, None].astype(mx.float32)

    def stored_weight(self) -> mx.array:
        """The whole stored matrix, float32 [rows, cols]."""
        return self.decode_rows(0, self.spec["rows"])

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] → [..., out] in the type of ``x``; weights are rounded to it, as a dense layer's are."""
        rows = self.spec["rows"]
        quantum = self.spec["tile"] or 1
        step = max(1, CHUNK_WEIGHTS // self.spec["stride"] // quantum) * quantum
        spans = [(start, min(start + step, rows)) for start in range(0, rows, step)]
        if self.spec["axis"] == 1:
            y = mx.concatenate([x @ self.decode_rows(*span).astype(x.dtype).T for span in spans], axis=-1)
        else:
            y = self._sum_of_parts(x, spans)
        return y + self.bias.astype(y.dtype) if "bias" in self else y

    def _sum_of_parts(self, x: mx.array, spans: list[tuple[int, int]]) -> mx.array:
        """The product for a transposed weight; partial sums are held in float32."""
        y = mx.zeros((), mx.float32)
        for start, stop in spans:
            weight = self.decode_rows(start, stop).astype(x.dtype)
            y = y + (x[..., start:stop] @ weight).astype(mx.float32)
        return y.astype(x.dtype)

    def _extra_repr(self) -> str:
        out_dims, in_dims = self.logical_shape
        return f"input_dims={in_dims}, output_dims={out_dims}, bias={'bias' in self}, {self.spec}"


class TrellisExperts(nn.Module):  # type: ignore[misc]
    """Stands for mlx-lm's ``SwitchLinear``: one trellis matrix an expert, of which the ones asked for are decoded.

    Parameters: ``weight`` uint32 [experts, words of one ...], ``scales`` float16 [experts, rows], ``table`` as in
    ``TrellisLinear``. Which experts run is read from the indices, so a call evaluates them.
    """

    layer_class: type[TrellisLinear] = TrellisLinear

    def __init__(self, spec: dict[str, Any], *, codes: mx.array | None):
        super().__init__()
        self.spec = {key: value for key, value in spec.items() if key != "experts"}
        self._codes = codes
        one = self.layer_class(self.spec, bias=False, codes=codes)
        self.weight = mx.zeros((spec["experts"], *one.weight.shape), mx.uint32)
        self.scales = mx.zeros((spec["experts"], spec["rows"]), mx.float16)
        if codes is None:
            self.table = one.table
        self.freeze()

    def expert(self, index: int) -> TrellisLinear:
        """The layer of one expert."""
        layer = self.layer_class(self.spec, bias=False, codes=self._codes)
        layer.weight, layer.scales = self.weight[index], self.scales[index]
        if "table" in self:
            layer.table = self.table
        return layer

    def product(self, index: int, x: mx.array) -> mx.array:
        """Rows ``x`` [n, in] through one expert: [n, out]."""
        return self.expert(index)(x)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """``x`` [..., 1, in], its leading axes those of ``indices`` or 1 in their place: [*indices, 1, out]."""
        rows = mx.broadcast_to(x[..., 0, :], (*indices.shape, x.shape[-1])).reshape(-1, x.shape[-1])
        places: dict[int, list[int]] = {}
        asked: Any = indices.reshape(-1).tolist()
        for place, index in enumerate(asked):
            places.setdefault(index, []).append(place)
        parts = []
        for index, held in sorted(places.items()):
            parts.append(self.product(index, rows[mx.array(held)]))
            mx.eval(parts[-1])  # so that one expert's weights are alive at a time
        order = mx.array([place for _, held in sorted(places.items()) for place in held])
        y = mx.concatenate(parts)[mx.argsort(order)]
        return y.reshape(*indices.shape, 1, -1)

    def stored_weight(self) -> mx.array:
        """All stored matrices, float32 [experts, rows, cols]."""
        return mx.stack([self.expert(index).stored_weight() for index in range(self.weight.shape[0])])

    def _extra_repr(self) -> str:
        return f"experts={self.weight.shape[0]}, {self.spec}"


def words_shape(spec: dict[str, Any]) -> tuple[int, ...]:
    """Shape of ``weight``: [rows, stride·k/32] where that holds whole blocks, else the flat stream; or tiles."""
    k, block, rows, stride = spec["k"], spec["block"], spec["rows"], spec["stride"]
    if tile := spec.get("tile", 0):
        return (-(-rows // tile), stride // tile * (block * k // 32))
    if stride * k % 32 == 0 and rows * stride % block == 0:
        return (rows, stride * k // 32)
    return (-(-rows * stride // block) * (block * k // 32),)


def code_values(code: str, window: int) -> mx.array | None:
    """Value of every state, float32 [2^window]; None for a code that has no formula and stores its table."""
    state = mx.arange(1 << window, dtype=mx.uint32)
    if code == "3inst":
        mixed = ((state * 89226354 + 64248484) & 0x8FFF8FFF) ^ 0x3B603B60
        halves = mixed.view(mx.float16).reshape(-1, 2).astype(mx.float32)
        return (halves[:, 0] + halves[:, 1]) * (1.0 / 1.24371088)
    if code not in BYTE_SUM_CODES:
        return None
    multiplier, addend, unit = BYTE_SUM_CODES[code]
    hashed = state * mx.array(multiplier, mx.uint32) + mx.array(addend, mx.uint32)
    total = (hashed & 255) + ((hashed >> 8) & 255) + ((hashed >> 16) & 255) + (hashed >> 24)
    return (total.astype(mx.int32) - 510).astype(mx.float32) * (1.0 / unit)
