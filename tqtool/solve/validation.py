"""Mean squared error of the trellis codec on Gaussian input, against what theory and QTIP say it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tqtool import native
from tqtool.formats.trellis import BLOCK, check_closed, pack, unpack
from tqtool.mathx import codes
from tqtool.mathx.gaussian import QTIP_TABLE_2, distortion_bound, lloyd_max_error
from tqtool.solve.trellis_rows import LEVEL_LIMIT

GOALS = {2: 0.0728, 3: 0.0191, 4: 0.00504}
"""Largest error allowed to the best code at its best scale, L=12."""

QTIP_TOLERANCE = {1: 0.01, 2: 0.01, 3: 0.02, 4: 0.04}
"""QTIP prints four digits: .0055 is anything from .00545 to .00555; random tables elsewhere span .0053-.0055."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeError:
    """Error of one code at one rate.

    Attributes:
        code: Name.
        k: Bits per weight.
        window: L.
        scale: Source scale before coding; the error is of the unscaled source.
        mse: Mean squared error, unit Gaussian source.
        se: Its standard error over blocks.
        problem: What is off, or None.
    """

    code: codes.Code
    k: int
    window: int
    scale: float
    mse: float
    se: float
    problem: str | None = None


def measure(
    code: codes.Code, k: int, *, window: int, scale: float, blocks: int, seed: int, warmup: int | None
) -> CodeError:
    """Code ``blocks`` blocks of seeded Gaussian samples and look at what a decoder would serve.

    The states go through pack and unpack on the way, so the whole codec is measured, not the encoder alone.
    """
    source = np.random.default_rng(seed).standard_normal((blocks, BLOCK), np.float32)
    unit = np.float32(codes.UNIT[code] * scale)
    inputs = np.clip(np.rint(source * unit), -LEVEL_LIMIT, LEVEL_LIMIT).astype(np.int16)
    states, _ = native.viterbi_encode(inputs, codes.levels(code, window), window=window, k=k, warmup=warmup)
    check_closed(states, k, window)
    served = codes.values(code, window)[unpack(pack(states, k), k, window)] / np.float32(scale)
    per_block = np.mean(np.square(source - served), axis=1, dtype=np.float64)
    return CodeError(
        code=code,
        k=k,
        window=window,
        scale=scale,
        mse=float(per_block.mean()),
        se=float(per_block.std() / np.sqrt(blocks)),
    )


def validate(
    *, window: int, blocks: int, seed: int, warmup: int | None, tick: Callable[[], None] = lambda: None
) -> Iterator[CodeError]:
    """Every code at every k, at unit scale and at its best scale, each judged.

    Laws: above the distortion bound; below Lloyd-Max; random and rptc at unit scale, L=12, Algorithm 4, within QTIP's
        Table 2;
    mul1 at its best scale within ``GOALS`` (L=12, Algorithm 4). Three standard errors are granted everywhere.
    """
    for k in (1, 2, 3, 4):
        for code in codes.CODES:
            for scale in (1.0, codes.CODE_SCALE[k]):
                row = measure(code, k, window=window, scale=scale, blocks=blocks, seed=seed, warmup=warmup)
                tick()
                yield _judged(row, is_parity=window == 12 and warmup is None)


def _judged(row: CodeError, *, is_parity: bool) -> CodeError:
    slack = 3 * row.se
    problem = None
    if row.mse < distortion_bound(row.k) - slack:
        problem = f"below the bound {distortion_bound(row.k):.5f}"
    elif row.mse > lloyd_max_error(row.k) + slack:
        problem = f"above Lloyd-Max {lloyd_max_error(row.k):.5f}"
    elif is_parity and row.scale == 1.0 and row.code in ("random", "rptc"):
        published, tolerance = QTIP_TABLE_2[row.k][0], QTIP_TOLERANCE[row.k]
        if abs(row.mse - published) > tolerance * published + slack:
            problem = f"QTIP's table has {published}"
    elif is_parity and row.scale != 1.0 and row.code == "mul1" and row.k in GOALS and row.mse > GOALS[row.k] + slack:
        problem = f"above the goal {GOALS[row.k]}"
    return CodeError(
        code=row.code, k=row.k, window=row.window, scale=row.scale, mse=row.mse, se=row.se, problem=problem
    )
