"""The kernels that packed artifacts carry in their model file: tqtool's own, and they run from there.

Metal's text under the executor stands for any device, as it does for tqtool's own layers.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.support.metal.device import Shim, ShimError
from tests.support.mlx_backend import compute
from tests.support.packed_artifact import write_packed
from tests.support.tiny_models import Tiny
from tests.support.trellis_cases import TABLE
from tests.support.trellis_oracle import arrays_of, check, expected
from tqtool.artifact.model_file import MODULES, kernel_texts, model_file
from tqtool.errors import UserError
from tqtool.kernels import cuda, device, sources
from tqtool.kernels.metal import METAL
from tqtool.kernels.metal_kernels import KERNELS, METAL_SWITCH
from tqtool.runtime.load import load

MOST_BYTES = 200_000
TOKENS = mx.array([[5, 9, 31, 7]])


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The file as mlx-lm imports it."""
    path = tmp_path_factory.mktemp("shipped") / "tqtool_model.py"
    path.write_bytes(model_file())
    spec = importlib.util.spec_from_file_location("custom_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_carries_the_kernels_as_they_stand_and_is_not_large(shipped):
    carried = {name: text for name, text in shipped.CARRIED.items() if "/" in name}
    assert carried == {name: (sources.source_root() / name).read_text() for name in carried}
    assert carried == kernel_texts()
    assert {kernel.source for kernel in KERNELS} < set(carried)
    assert len(model_file()) < MOST_BYTES


def test_it_needs_no_tqtool(shipped, tmp_path):
    """Everything that it carries is imported where there is no tqtool, not even on disk."""
    script = f"""
import importlib.util, json, sys
sys.modules["tqtool"] = None
import mlx.core as mx
spec = importlib.util.spec_from_file_location("custom_model", {shipped.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
before = [name for name in sys.modules if name.startswith("tqtool_model")]
backend = module.carried("kernels.device").backend_of(mx.Device(mx.cpu))
names = [name for name in sys.modules if name.startswith(module.CARRIED_ROOT + ".")]
print(json.dumps([before, str(backend), len(names)]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], "None", len(MODULES) + 1]  # stock_model itself is the one more


def of_each_kernel():
    """One case of the table for each kernel, without special values."""
    found = {}
    for case in TABLE:
        found.setdefault(kernel_name(case), case)
    return list(found.values())


def kernel_name(case):
    return METAL.choose(case.problem).kernel.name


@pytest.mark.parametrize("case", of_each_kernel(), ids=str)
def test_each_kernel_runs_from_the_file(case, shipped, executed):
    arrays = arrays_of(case)
    check(case, compute(case, arrays, executed), expected(case, arrays))


@pytest.fixture(scope="module")
def executed(shipped, tmp_path_factory):
    """The carried Metal backend, under the executor."""
    metal = shipped.carried("kernels.metal")
    return metal.METAL.with_runner(Shim(tmp_path_factory.mktemp("lanes"), launch=metal.on_device))


def test_a_fault_in_the_carried_text_is_found(shipped, tmp_path):
    """The text that runs is the file's, not the one beside tqtool."""
    metal, texts = shipped.carried("kernels.metal"), shipped.carried("kernels.sources")
    case = next(case for case in of_each_kernel() if kernel_name(case) == "expand")
    arrays, kept = arrays_of(case), dict(texts.CARRIED)
    texts.CARRIED["metal/expand.metal"] = kept["metal/expand.metal"].replace("float(scales[row])", "2.0f")
    texts.kernel_text.cache_clear()
    metal._compiled.cache_clear()
    try:
        backend = metal.METAL.with_runner(Shim(tmp_path, launch=metal.on_device))
        with pytest.raises((AssertionError, ShimError)):
            check(case, compute(case, arrays, backend), expected(case, arrays))
    finally:
        texts.CARRIED.update(kept)
        texts.kernel_text.cache_clear()
        metal._compiled.cache_clear()


def test_cuda_compiles_the_same_texts(shipped):
    """What NVRTC compiles in tests/kernels/test_cuda_compile.py is what the file holds."""
    carried = shipped.carried("kernels.cuda")
    for case in TABLE:
        choice = cuda.CUDA.choose(case.problem)
        if choice.kernel is None:
            continue
        ours, theirs = cuda.CUDA.call(case.problem), carried.CUDA.call(case.problem)
        assert ours.launch.grid == theirs.launch.grid
        assert cuda.included_texts(ours.source, ours.launch.template) == carried.included_texts(
            theirs.source, theirs.launch.template
        )


def test_a_model_through_the_carried_kernels(shipped, executed, tmp_path, monkeypatch):
    """Where a device has kernels, layers go through them, gate and up at once; the logits are those of the CPU."""
    tiny = Tiny(hidden=64, intermediate=72, heads=2, kv_heads=1, layers=1, dtype="float32")
    folder = write_packed(tmp_path / "packed", tiny, k=(3, 2))
    expected_logits = np.array(load(folder).model(TOKENS)[0])
    monkeypatch.setattr(shipped.carried("kernels.device"), "backend_of", lambda device: executed)
    monkeypatch.setattr(shipped.mx, "default_device", lambda: mx.Device(mx.gpu))
    layer_class = shipped.layer_class_here()
    monkeypatch.undo()
    monkeypatch.setattr(shipped, "layer_class_here", lambda: layer_class)

    config = json.loads((folder / "config.json").read_text())
    model = shipped.Model(shipped.ModelArgs.from_dict(config))
    model.model.embed_tokens = model.model.embed_tokens.to_quantized(group_size=64, bits=6)
    model.load_weights(str(folder / "model.safetensors"))
    mlp = model.model.layers[0].mlp
    assert type(mlp.down_proj).__name__ == "MetalTrellisLinear"
    assert type(mlp).__module__.startswith(shipped.CARRIED_ROOT)
    found = np.array(model(TOKENS)[0])
    np.testing.assert_allclose(found, expected_logits, atol=1e-4 * np.abs(expected_logits).max())
    assert "scales" in dict(tree_flatten(mlp.down_proj.parameters()))


@pytest.mark.parametrize(("value", "name"), [(None, None), ("0", None), ("1", "Metal")])
def test_metal_kernels_are_asked_for(value, name, shipped, monkeypatch):
    """No Apple GPU has run them: decision 0004."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.delenv(METAL_SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(METAL_SWITCH, value)
    for module in (device, shipped.carried("kernels.device")):
        backend = module.backend_of(mx.Device(mx.gpu))
        assert (backend and backend.name) == name
        assert module.backend_of(mx.Device(mx.cpu)) is None


def test_a_switch_that_says_neither_yes_nor_no(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setenv(METAL_SWITCH, "yes")
    with pytest.raises(UserError, match="TQTOOL_METAL_KERNELS=yes: expected 1"):
        device.backend_of(mx.Device(mx.gpu))
