"""Decode sampled rows: values must be finite, and what serves them must read the words as docs/formats says.

What serves is ``mx.dequantize`` for affine modules and our compiled kernel for trellis modules; each is held, bit for
bit, against an independent decoder in Python. One function per packed format; a new format adds its own and one line in
``decode_problems``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tqtool import native
from tqtool.artifact.reader import Artifact, affine_spec
from tqtool.formats import affine, trellis
from tqtool.mathx import codes
from tqtool.solve.quantizer import ConfigEntry

SAMPLED_ROWS = 3


def decode_problems(artifact: Artifact, entries: Mapping[str, ConfigEntry]) -> tuple[int, list[str]]:
    """Number of modules sampled, and what was wrong."""
    problems: list[str] = []
    specs = trellis.specs_from_config(dict(artifact.config))
    for module, entry in entries.items():
        if module in specs:
            problems += _trellis_problems(artifact, module, specs[module])
        elif isinstance(entry, dict):
            problems += _affine_problems(artifact, module, affine_spec(module, entry))
        else:
            problems += _dense_problems(artifact, f"{module}.weight")
    return len(entries), problems


def _affine_problems(artifact: Artifact, module: str, spec: affine.AffineSpec) -> list[str]:
    """Our bit-by-bit decoder and ``mx.dequantize`` must agree exactly, both in float32."""
    import mlx.core as mx

    n_rows = artifact.tensors[f"{module}.weight"].shape[0]
    problems = []
    for row in _spread(n_rows, SAMPLED_ROWS):
        words = artifact.read_rows(f"{module}.weight", row, row + 1)
        scales = artifact.read_rows(f"{module}.scales", row, row + 1)
        biases = artifact.read_rows(f"{module}.biases", row, row + 1) if spec.mode == "affine" else None
        if spec.mode == "affine" and biases is not None:
            scales, biases = scales.astype(np.float32), biases.astype(np.float32)
        ours = affine.dequantize(words, scales, biases, spec)
        if not np.isfinite(ours).all():
            problems.append(f"{module}: row {row} decodes to values that are not finite")
            continue
        theirs = mx.dequantize(
            mx.array(words),
            mx.array(scales),
            None if biases is None else mx.array(biases),
            group_size=spec.group_size,
            bits=spec.bits,
            mode=spec.mode,
            dtype=mx.float32,
            stream=mx.cpu,
        )
        if not np.array_equal(ours, np.asarray(theirs)):
            worst = float(np.abs(ours - np.asarray(theirs)).max())
            problems.append(f"{module}: row {row}: mx.dequantize differs from the format by {worst:.3g}")
    return problems


def _trellis_problems(artifact: Artifact, module: str, spec: trellis.TrellisSpec) -> list[str]:
    """The kernel that serves the matrix and the format's own decoder must agree on every bit of the sampled rows.

    Any words are a path of the trellis, so that the words make sense proves nothing; that both read the same does.
    """
    scales = artifact.read(f"{module}.scales")
    if not np.isfinite(scales.astype(np.float32)).all():
        return [f"{module}.scales: holds values that are not finite"]
    values = codes.values(spec.code, spec.window)
    matrix = spec.matrix
    problems = []
    for expert in _spread(max(1, spec.experts), SAMPLED_ROWS):
        where = f"{module}, expert {expert}" if spec.experts else module
        own = scales.reshape(-1, spec.rows)[expert]
        for row in _spread(spec.rows, SAMPLED_ROWS):
            start, part = _rows_around(matrix, row)
            first = expert * spec.n_words + start * spec.stride // spec.block * spec.words_per_block
            words = artifact.read_flat(f"{module}.weight", first, first + part.n_words)
            levels = part.from_stream(values[trellis.unpack(words.reshape(part.n_blocks, -1), spec.k, spec.window)])
            ours = levels * own[start : start + part.rows, None].astype(np.float32)
            if not np.isfinite(ours).all():
                problems.append(f"{where}: row {row} decodes to values that are not finite")
                continue
            served = native.trellis_expand(words, own[start : start + part.rows], part)
            if not np.array_equal(ours.view(np.uint32), served.view(np.uint32)):
                worst = float(np.abs(ours - served).max())
                problems.append(f"{where}: row {row}: the compiled kernel differs from the format by {worst:.3g}")
    return problems


def _rows_around(spec: trellis.TrellisSpec, row: int) -> tuple[int, trellis.TrellisSpec]:
    """The last row up to ``row`` that starts on a block, and the spec of the rows from there to ``row``.

    Blocks run on across rows when the stride is no multiple of them, so ``row`` alone may begin inside one.
    """
    start = row // spec.row_group * spec.row_group
    return start, replace(spec, rows=row + 1 - start)


def _dense_problems(artifact: Artifact, name: str) -> list[str]:
    n_rows = artifact.tensors[name].shape[0]
    for row in _spread(n_rows, SAMPLED_ROWS):
        if not np.isfinite(artifact.read_rows(name, row, row + 1).astype(np.float32)).all():
            return [f"{name}: row {row} holds values that are not finite"]
    return []


def _spread(count: int, limit: int) -> list[int]:
    """Up to ``limit`` indices below ``count``, first and last among them."""
    if count <= limit:
        return list(range(count))
    return [index * (count - 1) // (limit - 1) for index in range(limit)]
