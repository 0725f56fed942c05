"""Packed trellis matrices, formats v1 and v2: the one place in Python that knows where a symbol lies.

docs/formats/trellis.md is the same for a stranger.

A stored matrix is ``[rows, cols]``: the weight ``[out, in]`` itself (axis 1, coded along the input dimension) or its
transpose ``[in, out]`` (axis 0, coded along the output dimension). Its elements form one stream, cut into blocks of
``block`` (T) weights. In rows (``tile`` 0) element (r, c) is number ``r·stride + c``; the last block is padded. In
tiles (``tile`` 16, v2) a block is a square of 16 × 16, row-major, and squares follow one another along the inputs;
rows and columns are padded to whole squares. A block is a tail-biting path through 2^window states and takes T·k
bits::

    bit        (T-1-t)·k …                          k = 3, T = 256: 96 bytes
    …  | b_{t+1} | b_t | b_{t-1} | b_{t-2} | b_{t-3} | …      →  higher bits
                 └─ L bits from here, wrapping, are state_t = …b_{t-3} b_{t-2} b_{t-1} b_t (b_t lowest)

Value served: ``f32(code(state)) · f32(scales[r])``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import ArtifactError, UserError
from tqtool.mathx.codes import CODES, Code, check_window

Element = TypeVar("Element", bound=np.generic)

FORMAT_VERSION = 2
VERSIONS = (1, 2)
"""Version 1 has no ``tile``: all its matrices are in rows."""
BLOCK = 256
TILE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrellisSpec:
    """Everything a decoder must know about one stored matrix.

    Attributes:
        k: bits per weight, 1..4.
        window: L, state bits: 12, 14 or 16.
        block: T, weights per tail-biting block.
        code: how a state becomes a value (``tqtool.mathx.codes``).
        axis: 1 if rows run over outputs and the code along inputs; 0 if transposed.
        rows: rows of the stored matrix, each with one float16 scale.
        cols: weights in a row.
        stride: distance of two rows in the stream, in weights; ``cols``, or ``cols`` rounded up to whole blocks. In
            tiles: ``cols`` rounded up to whole tiles.
        tile: 0 for rows one after another; 16 for squares of 16 × 16 (axis 1 only).
        experts: 0 for one matrix; else how many of them are stored in one tensor, along a leading axis. Everything but
            the shapes of tensors is about one matrix.
    """

    k: int
    window: int = 12
    block: int = BLOCK
    code: Code = "mul1"
    axis: Literal[0, 1] = 1
    rows: int
    cols: int
    stride: int
    tile: int = 0
    experts: int = 0

    def __post_init__(self) -> None:
        check_window(self.window)
        if not 1 <= self.k <= 4:
            raise UserError(f"trellis k={self.k}: expected 1, 2, 3 or 4 bits per weight")
        if self.code not in CODES:
            raise UserError(f"trellis code {self.code!r}: expected one of {', '.join(CODES)}")
        if self.axis not in (0, 1):
            raise UserError(f"trellis axis {self.axis}: expected 0 (along outputs) or 1 (along inputs)")
        if self.block != BLOCK:
            raise UserError(f"trellis block {self.block}: format v{FORMAT_VERSION} knows {BLOCK}")
        if min(self.rows, self.cols) < 1 or self.stride < self.cols:
            raise UserError(
                f"trellis shape rows={self.rows} cols={self.cols} stride={self.stride}: expected 1 ≤ cols ≤ stride"
            )
        if self.experts < 0:
            raise UserError(f"trellis experts {self.experts}: expected 0 (one matrix) or their number")
        if self.tile not in (0, TILE):
            raise UserError(f"trellis tile {self.tile}: expected 0 (rows) or {TILE} (squares)")
        if self.tile and (self.axis != 1 or self.stride != _up(self.cols, TILE)):
            raise UserError(
                f"trellis tile {self.tile} with axis {self.axis}, cols {self.cols}, stride {self.stride}: "
                f"expected axis 1 and cols rounded up to {TILE}"
            )

    @property
    def layout(self) -> str:
        """``tile``, ``axis1`` or ``axis0``: what people read."""
        return "tile" if self.tile else f"axis{self.axis}"

    @property
    def row_group(self) -> int:
        """Rows after which rows and blocks begin together."""
        return self.tile or self.block // math.gcd(self.stride, self.block)

    @property
    def n_blocks(self) -> int:
        """Blocks in the stream, padding included."""
        rows = _up(self.rows, self.tile) if self.tile else self.rows
        return -(-rows * self.stride // self.block)

    @property
    def words_per_block(self) -> int:
        """32-bit words of one block."""
        return self.block * self.k // 32

    @property
    def n_words(self) -> int:
        """32-bit words of the whole matrix."""
        return self.n_blocks * self.words_per_block

    @property
    def n_padding(self) -> int:
        """Coded weights that stand for nothing."""
        return self.n_blocks * self.block - self.rows * self.cols

    @property
    def words_shape(self) -> tuple[int, ...]:
        """Shape of the ``.weight`` tensor: rows of words where they come out whole, else flat; or rows of tiles."""
        lead = (self.experts,) if self.experts else ()
        if self.tile:
            return (*lead, -(-self.rows // self.tile), self.stride // self.tile * self.words_per_block)
        if self.stride * self.k % 32 == 0 and self.rows * self.stride % self.block == 0:
            return (*lead, self.rows, self.stride * self.k // 32)
        return (*lead, self.n_words)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Shape of the ``.scales`` tensor."""
        return (self.experts, self.rows) if self.experts else (self.rows,)

    @property
    def served_shape(self) -> tuple[int, ...]:
        """Shape of the module's weight: ``[out, in]``, or ``[experts, out, in]``."""
        return (self.experts, *self.weight_shape) if self.experts else self.weight_shape

    @property
    def matrix(self) -> TrellisSpec:
        """The spec of one matrix."""
        return replace(self, experts=0)

    @property
    def weight_shape(self) -> tuple[int, int]:
        """``[out, in]`` of the weight that is served."""
        return (self.rows, self.cols) if self.axis == 1 else (self.cols, self.rows)

    def to_config(self) -> dict[str, Any]:
        """Plain values for config.json; ``experts`` stands there only for a stack."""
        values = asdict(self)
        if not self.experts:
            del values["experts"]
        return values

    def to_stream(self, stored: NDArray[Element]) -> NDArray[Element]:
        """``[rows, cols]`` in the order of coding, ``[n_blocks, block]``; padding is zero."""
        padded_rows = -(-self.n_blocks * self.block // self.stride) if self.tile else self.rows
        padded = np.pad(stored, ((0, padded_rows - self.rows), (0, self.stride - self.cols)))
        if self.tile:
            squares = padded.reshape(-1, self.tile, self.stride // self.tile, self.tile).swapaxes(1, 2)
            return np.ascontiguousarray(squares).reshape(-1, self.block)
        stream = padded.reshape(-1)
        return np.pad(stream, (0, -stream.size % self.block)).reshape(-1, self.block)

    def from_stream(self, blocks: NDArray[Element]) -> NDArray[Element]:
        """The inverse of :meth:`to_stream`; padding is dropped."""
        if self.tile:
            squares = blocks.reshape(-1, self.stride // self.tile, self.tile, self.tile).swapaxes(1, 2)
            return np.ascontiguousarray(squares.reshape(-1, self.stride)[: self.rows, : self.cols])
        return blocks.reshape(-1)[: self.rows * self.stride].reshape(self.rows, self.stride)[:, : self.cols]

    @classmethod
    def from_config(cls, module: str, value: dict[str, Any], version: int = FORMAT_VERSION) -> TrellisSpec:
        """Read one entry of ``config["trellis"]["modules"]``; ArtifactError if it is not a valid one."""
        names = {field.name for field in fields(cls)} - ({"tile", "experts"} if version == 1 else {"experts"})
        if not isinstance(value, dict) or set(value) - ({"experts"} if version > 1 else set()) != names:
            found = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ArtifactError(
                f"config.json: trellis entry of {module}: expected the keys {sorted(names)}, found {found}"
            )
        for name, found in value.items():
            kind = str if name == "code" else int
            if name == "experts" and found == 0:
                raise ArtifactError(f"config.json: trellis entry of {module}: experts: expected 1 or more, found 0")
            if type(found) is not kind:  # not isinstance: True is an int to Python, 12.0 equals 12
                raise ArtifactError(
                    f"config.json: trellis entry of {module}: {name}: expected {kind.__name__}, found {found!r:.80}"
                )
        try:
            return cls(**value)
        except UserError as error:
            raise ArtifactError(f"config.json: trellis entry of {module}: {error}") from error


def spec_for(
    shape: tuple[int, int],
    *,
    k: int,
    axis: Literal[0, 1],
    window: int = 12,
    code: Code = "mul1",
    pad_rows: bool = False,
    tile: bool = False,
) -> TrellisSpec:
    """Spec of a weight ``[out, in]``.

    ``pad_rows`` starts every row on a block of its own; by default blocks run on across rows. ``tile`` stores squares.
    """
    if tile:
        rows, cols = shape
        return TrellisSpec(
            k=k, window=window, code=code, axis=axis, rows=rows, cols=cols, stride=_up(cols, TILE), tile=TILE
        )
    rows, cols = shape if axis == 1 else (shape[1], shape[0])
    stride = -(-cols // BLOCK) * BLOCK if pad_rows else cols
    return TrellisSpec(k=k, window=window, code=code, axis=axis, rows=rows, cols=cols, stride=stride)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def pack(states: NDArray[np.uint16], k: int) -> NDArray[np.uint32]:
    """Words of blocks: states ``[n, T]`` → uint32 ``[n, T·k/32]``. Only the low k bits of each state are stored.

    The states can be read back if, and only if, every block is a closed path: ``check_closed`` says so, not this.
    """
    n_blocks, block = states.shape
    symbols = states[:, ::-1] & np.uint16((1 << k) - 1)
    bits = (symbols[:, :, None] >> np.arange(k, dtype=np.uint16)) & np.uint16(1)
    packed = np.packbits(bits.reshape(n_blocks, block * k).astype(np.uint8), axis=1, bitorder="little")
    return packed.view("<u4").astype(np.uint32, copy=False)


def unpack(words: NDArray[np.uint32], k: int, window: int) -> NDArray[np.uint16]:
    """States ``[n, T]`` of blocks ``[n, T·k/32]``: the inverse of :func:`pack`."""
    n_blocks, n_words = words.shape
    block = n_words * 32 // k
    stream = np.unpackbits(np.ascontiguousarray(words.astype("<u4")).view(np.uint8), axis=1, bitorder="little")
    stream = np.concatenate([stream, stream[:, :window]], axis=1)
    states = np.zeros((n_blocks, block), np.uint16)
    for bit in range(window):
        states |= stream[:, bit : bit + block * k : k].astype(np.uint16) << np.uint16(bit)
    return states[:, ::-1]


def check_closed(states: NDArray[np.uint16], k: int, window: int) -> None:
    """Raise ArtifactError unless every block ``[n, T]`` is a closed path of the trellis."""
    keep = np.uint16((1 << (window - k)) - 1)
    broken = (states >> np.uint16(k)) != (np.roll(states, 1, axis=1) & keep)
    if broken.any():
        block, step = (int(i) for i in np.argwhere(broken)[0])
        raise ArtifactError(f"trellis block {block}, step {step}: the state does not continue the step before it")


def specs_from_config(config: dict[str, Any]) -> dict[str, TrellisSpec]:
    """All trellis modules that a config.json names; empty if it has no ``trellis``, ArtifactError if malformed."""
    section = config.get("trellis")
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ArtifactError(f"config.json: trellis: expected an object, found {type(section).__name__}")
    version = section.get("format_version")
    if type(version) is not int or version not in VERSIONS:  # True == 1 == 1.0
        raise ArtifactError(
            f"config.json: trellis format_version: expected 1 or 2, found {version!r:.80}",
            hint="this artifact needs another tqtool version",
        )
    modules = section.get("modules")
    if not isinstance(modules, dict):
        raise ArtifactError(f"config.json: trellis modules: expected an object, found {type(modules).__name__}")
    return {module: TrellisSpec.from_config(module, entry, version) for module, entry in modules.items()}
