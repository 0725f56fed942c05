"""How CUDA's tile kernels are launched; without a card, by a runner that answers as they do."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tqtool import native
from tqtool.formats.trellis import spec_for
from tqtool.kernels import cuda
from tqtool.kernels.backend import Backend, Packed
from tqtool.kernels.cuda import cuda_backend
from tqtool.kernels.cuda_kernels import A100, H200, kernels, tile_blocks, tile_rows
from tqtool.kernels.metal import sum_parts
from tqtool.kernels.problem import Problem

SHAPE = (35, 64)


def as_the_kernel(call):
    template = dict(call.launch.template)

    def run(arrays):
        x, words, scales = arrays
        assert x.size == template["M"] * template["COLS"]
        spec = spec_for(SHAPE, k=template["K"], axis=1, tile=True)
        inputs = np.array(x.reshape(-1, x.shape[-1]).astype(mx.float32))
        y = native.trellis_matvec(np.array(words), np.array(scales), spec, inputs)
        (output,) = call.launch.outputs
        return [mx.array(y).astype(getattr(mx, template["T"])).reshape(output.shape)]

    return run


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 64), (64,)], ids=str)
def test_the_kernel_writes_the_result_in_the_shape_that_is_wanted(dtype, shape):
    spec = spec_for(SHAPE, k=3, axis=1, tile=True)
    rng = np.random.default_rng(0)
    packed = Packed(
        mx.array(rng.integers(0, 2**32, spec.words_shape, dtype=np.uint32)),
        mx.array(rng.uniform(0.5, 1, 35).astype(np.float16)),
        spec,
    )
    backend = cuda_backend(H200).with_runner(as_the_kernel)
    x = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(getattr(mx, dtype))
    choice = backend.choose(Problem(spec=spec, m=x.size // 64, dtype=dtype))
    assert choice.path == "tile"
    y = backend.product(choice, x, packed)
    assert (y.shape, y.dtype) == ((*shape[:-1], 35), x.dtype)
    wanted = native.trellis_matvec(
        np.array(packed.words), np.array(packed.scales), spec, np.array(x.reshape(-1, 64).astype(mx.float32))
    )
    assert np.array_equal(np.array(y.reshape(-1, 35)), wanted.astype(np.array(y).dtype))


def test_a_bound_product_is_traced_once():
    """Python carries the kernel's call out at the first product of a shape; later ones repeat it with their own x."""
    spec = spec_for(SHAPE, k=3, axis=1, tile=True)
    seen = []

    def run(call):
        def ready(arrays):
            seen.append(call.name)
            x, words, scales = arrays
            return [x.sum(axis=-1, keepdims=True) + scales.astype(x.dtype) + words[0, 0].astype(x.dtype)]

        return ready

    cuda_own = cuda_backend(H200)
    assert cuda_own.traced is mx.compile
    backend = Backend("own", kernels(H200), sum_parts, run, cuda_own.traced)
    lazy = mx.ones((35,), mx.float16) * 2  # what makes a matrix is not a part of the product
    packed = Packed(mx.zeros(spec.words_shape, mx.uint32) + 3, lazy, spec)
    choice = backend.choose(Problem(spec=spec, m=1, dtype="float32"))
    product = backend.bind(choice, (1, 64), packed)
    for value in (1.0, 2.0, 3.0):
        np.testing.assert_array_equal(np.array(product(mx.full((1, 64), value))), np.full((1, 35), 64 * value + 5))
    assert seen == ["tile"]


@pytest.mark.parametrize("card", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("row_tiles", [1, 7, 131, 133, 320, 1088, 5000])
@pytest.mark.parametrize("most_rows", [32, 40, 300, 2000])
def test_no_block_has_more_rows_than_its_memory_holds(card, row_tiles, most_rows):
    blocks = tile_blocks(row_tiles, most_rows, card)
    assert 2 <= tile_rows(row_tiles, blocks) <= most_rows
    assert blocks <= 8 * row_tiles
    assert blocks <= card.processors or tile_rows(row_tiles, blocks - 1) > most_rows - 16


def test_int8_takes_a_third_of_the_columns():
    spec = spec_for((17408, 5120), k=3, axis=1, tile=True)
    call = cuda_backend(H200).call
    full, rounded = (call(Problem(spec=spec, m=4, dtype="bfloat16", int8=int8)).launch for int8 in (False, True))
    assert [dict(launch.template)["LIMBS"] for launch in (full, rounded)] == [3, 1]
    assert rounded.threadgroup_bytes < full.threadgroup_bytes
    assert full.threadgroup_bytes <= H200.shared_bytes


def test_mlx_gets_a_text_that_includes_ours(monkeypatch):
    """Two lines at every call, in place of 16 KB; under a name that says all that the code depends on."""
    made = []

    def cuda_kernel(**options):
        made.append(options)
        return lambda **_: [mx.zeros((1,))]

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    cuda._compiled.cache_clear()
    arrays = [mx.zeros((1, 64), mx.float16), mx.zeros((1,), mx.uint32), mx.zeros((1,), mx.float16)]
    for k, dtype in ((3, "float16"), (2, "float16"), (3, "float32")):
        spec = spec_for(SHAPE, k=k, axis=1, tile=True)
        arrays[0] = arrays[0].astype(getattr(mx, dtype))
        run = cuda.on_device(cuda_backend(H200).call(Problem(spec=spec, m=1, dtype=dtype)))
        run(arrays)
        run(arrays)
    cuda._compiled.cache_clear()
    assert len(made) == 3  # once for each call that was made ready
    assert len({options["name"] for options in made}) == 3
    for options, (k, kind) in zip(made, ((3, "__half"), (2, "__half"), (3, "float")), strict=True):
        files = [Path(re.fullmatch(r'#include "(.*)"\n', options[part]).group(1)) for part in ("header", "source")]
        header, body = (file.read_text() for file in files)
        assert "tq_tile(" in header
        assert {f"using T = {kind};", f"constexpr int K = {k};", "constexpr int BLOCKS = 24;"} <= set(body.splitlines())
        assert body.rstrip().endswith("out);")
        assert len(options["header"]) + len(options["source"]) < 400
