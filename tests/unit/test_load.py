"""Loading: what each kind of artifact becomes, and what bad folders get."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from tests.support.packed_artifact import write_packed
from tests.support.tiny_models import Tiny, write_tiny, write_weights
from tqtool.errors import ArtifactError, SourceError, UserError
from tqtool.formats.manifest import MANIFEST_NAME
from tqtool.runtime.affine import PromptLinear
from tqtool.runtime.linear import NativeTrellisLinear
from tqtool.runtime.load import load
from tqtool.source.checkpoint import open_checkpoint

TINY = Tiny(hidden=96, intermediate=160, heads=3, kv_heads=1, head_dim=32, tied=True)
TOKENS = mx.array([[5, 9, 31, 7, 7, 200, 3, 11]])


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return write_packed(tmp_path_factory.mktemp("packed") / "model", Tiny(hidden=128, intermediate=200))


def logits(loaded, tokens=TOKENS):
    return np.array(loaded.model(tokens)[0])


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def quantized(folder, tiny, *, bits, group_size, mode):
    """A stock mlx-lm folder of ``tiny`` with every layer packed by mlx."""
    write_tiny(folder, tiny)
    tensors = {}
    for name, tensor in tiny.tensors().items():
        if tensor.ndim == 2:
            weight = mx.array(tensor.astype(np.float32)).astype(mx.bfloat16)
            parts = mx.quantize(weight, group_size=group_size, bits=bits, mode=mode)
            for part, array in zip(("weight", "scales", "biases"), parts, strict=False):
                tensors[name.replace(".weight", f".{part}")] = array
        else:
            tensors[name] = mx.array(tensor.astype(np.float32)).astype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    edit_config(folder, quantization={"group_size": group_size, "bits": bits, "mode": mode})
    return folder


def test_float_folder_runs_in_float32(tmp_path):
    loaded = load(write_tiny(tmp_path / "m", TINY))
    assert {str(value.dtype) for _, value in tree_flatten(loaded.model.parameters())} == {"mlx.core.float32"}
    assert loaded.report.dtype == "float32"
    assert loaded.report.n_expanded == 0
    assert loaded.tokenizer.eos_token_ids == {2}


def test_rotary_settings_of_transformers_5_are_used(tmp_path):
    """They stand under rope_parameters only, where mlx-lm's llama does not look: without help it takes base 10000."""
    outputs = {}
    for name, changes in (
        ("old", {"rope_theta": 500000.0}),
        ("new", {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
        ("other", {}),
    ):
        folder = write_tiny(tmp_path / name, TINY)
        edit_config(folder, **changes)
        outputs[name] = logits(load(folder))
    assert np.array_equal(outputs["new"], outputs["old"])
    assert not np.allclose(outputs["other"], outputs["old"], atol=1e-3)


@pytest.mark.parametrize("compute", ["packed", "expand"])
def test_biases_of_quantized_layers_are_served(tmp_path, compute):
    """Five tokens take the prompt path, one the matvec path; both must add the bias that stock mlx-lm adds."""
    tiny = Tiny(model_type="qwen2")
    folder = write_tiny(tmp_path / "m", tiny)
    tensors = {}
    for name, tensor in tiny.tensors().items():
        array = mx.array(tensor.astype(np.float32)).astype(mx.bfloat16)
        if tensor.ndim == 2:
            parts = mx.quantize(array, group_size=64, bits=8)
            stem = name.removesuffix("weight")
            tensors |= {stem + part: value for part, value in zip(("weight", "scales", "biases"), parts, strict=True)}
        else:
            tensors[name] = array * (50 if name.endswith("bias") else 1)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    edit_config(folder, quantization={"group_size": 64, "bits": 8, "mode": "affine"})
    stock, _ = load_model(folder)
    stock.set_dtype(mx.float32)
    for tokens in (TOKENS, TOKENS[:, :1]):
        expected, found = np.array(stock(tokens)[0]), logits(load(folder, compute=compute), tokens)
        assert np.abs(found - expected).max() < 1e-4 * expected.std()


def test_dtype_can_be_chosen(tmp_path):
    loaded = load(write_tiny(tmp_path / "m", TINY), dtype="bfloat16")
    assert {str(value.dtype) for _, value in tree_flatten(loaded.model.parameters())} == {"mlx.core.bfloat16"}


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [("affine", 3, 32), ("affine", 8, 32), ("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)],
)
def test_expanding_changes_no_weight(tmp_path, mode, bits, group_size):
    folder = quantized(tmp_path / "m", TINY, bits=bits, group_size=group_size, mode=mode)
    kept, expanded = load(folder), load(folder, compute="expand")
    stock, _ = load_model(folder)  # MLX's own quantized kernels
    stock.set_dtype(mx.float32)
    reference = np.array(stock(TOKENS)[0])
    classes = {type(module) for _, module in expanded.model.named_modules()}
    assert not classes & {nn.QuantizedLinear, nn.QuantizedEmbedding}
    assert expanded.report.n_expanded == 7 * TINY.layers + 1
    assert expanded.report.kept_packed == ()
    # The same float32 values on both sides, summed in another order: a few hundred roundings of 6e-8.
    for loaded in (kept, expanded):
        np.testing.assert_allclose(logits(loaded), reference, atol=1e-4 * np.abs(reference).max())
        np.testing.assert_allclose(logits(loaded, TOKENS[:, :1]), reference[:1], atol=1e-4 * np.abs(reference).max())
    assert {type(layer.self_attn.q_proj) for layer in kept.model.model.layers} == {PromptLinear}
    # bf16 scales must be widened before dequantization: not every weight may be a bf16 number.
    weight = np.array(expanded.model.model.layers[0].mlp.up_proj.weight)
    if mode == "affine":
        assert (weight.view(np.uint32) & 0xFFFF).any()


def test_packed_equals_its_dense_twin(packed):
    twin = load(packed.with_name("model-fake"))
    kept, expanded = load(packed), load(packed, compute="expand")
    assert kept.report.n_trellis == 14
    assert isinstance(kept.model.model.layers[0].mlp.down_proj, NativeTrellisLinear)
    assert expanded.report.n_expanded == 15
    for name, value in tree_flatten(expanded.model.parameters()):
        if "embed" not in name:
            np.testing.assert_array_equal(np.array(value), np.array(dict(tree_flatten(twin.model.parameters()))[name]))
    reference = logits(twin)
    for other in (kept, expanded):
        np.testing.assert_allclose(logits(other), reference, atol=1e-4 * np.abs(reference).max())
        one = logits(other, TOKENS[:, :1])  # one row: the packed matvec
        np.testing.assert_allclose(one, reference[:1], atol=1e-4 * np.abs(reference).max())


def test_trellis_scales_keep_their_type(packed):
    layer = load(packed).model.model.layers[1].self_attn.q_proj
    assert (layer.weight.dtype, layer.scales.dtype) == (mx.uint32, mx.float16)


def test_the_module_file_of_an_artifact_is_never_run(packed, tmp_path):
    (packed / "tqtool_model.py").write_text("raise SystemExit('executed')\n")
    assert load(packed).report.n_trellis == 14


def test_not_a_model_folder(tmp_path):
    with pytest.raises(UserError, match="expected a model folder, found no such folder"):
        load(tmp_path / "absent")
    with pytest.raises(UserError, match=r"no config\.json in it"):
        load(tmp_path)


@pytest.mark.parametrize("argument", [{"compute": "dense"}, {"dtype": "float64"}])
def test_unknown_choices(tmp_path, argument):
    with pytest.raises(UserError, match="expected one of"):
        load(tmp_path, **argument)


def test_custom_code_is_refused(tmp_path):
    folder = write_tiny(tmp_path / "m", TINY)
    edit_config(folder, model_file="own.py")
    with pytest.raises(UserError, match=r"model_file 'own.py': the model brings its own code"):
        load(folder)


def test_unknown_architecture(tmp_path):
    folder = write_tiny(tmp_path / "m", TINY)
    edit_config(folder, model_type="nonesuch")
    with pytest.raises(UserError, match="Model type nonesuch not supported"):
        load(folder)


DEEP = "[" * 100_000


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 4}', DEEP])
def test_damaged_config(tmp_path, packed, text):
    folder = write_tiny(tmp_path / "m", TINY)
    (folder / "config.json").write_text(text)
    with pytest.raises(SourceError, match=r"config\.json"):
        load(folder)
    artifact = copy(packed, tmp_path)
    (artifact / MANIFEST_NAME).parent.mkdir(exist_ok=True)
    (artifact / MANIFEST_NAME).touch()
    (artifact / "config.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"config\.json"):
        load(artifact)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "128"}, "field 'hidden_size': expected a whole number, found '128'"),
        ({"num_hidden_layers": 2.5}, "field 'num_hidden_layers': expected a whole number"),
        ({"vocab_size": True}, "field 'vocab_size': expected a whole number, found True"),
        ({"rms_norm_eps": "x"}, "field 'rms_norm_eps': expected a number, found 'x'"),
        ({"rope_parameters": [1]}, "field 'rope_parameters': expected an object"),
        ({"hidden_act": 5}, "field 'hidden_act': expected a string"),
        ({"tie_word_embeddings": "yes"}, "field 'tie_word_embeddings': expected true or false"),
        ({"hidden_size": None}, r"mlx-lm cannot build the model of this config and these weights \(TypeError"),
        ({"eos_token_id": {"a": 1}}, r"tokenizer cannot be loaded|cannot build"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"already quantized, quantization_config \(gptq",
        ),
        ({"model_type": "qwen3", "attention_bias": True}, "qwen3 has no attention biases"),
    ],
)
def test_odd_configs_are_errors_of_the_source(tmp_path, changes, message):
    """Whatever mlx-lm or transformers raise for them, down to UnboundLocalError."""
    folder = write_tiny(tmp_path / "m", TINY)
    edit_config(folder, **changes)
    with pytest.raises(SourceError, match=message):
        load(folder)


def test_a_path_that_looks_like_a_pattern_is_a_path(tmp_path, packed):
    folder = write_tiny(tmp_path / "a [b] *" / "m?[c]", TINY)
    assert np.isfinite(logits(load(folder))).all()
    artifact = copy(packed, tmp_path / "a [b] *")
    assert np.array_equal(logits(load(artifact)), logits(load(packed)))


def test_damaged_weights_of_a_source_are_errors_of_the_source(tmp_path):
    folder = write_tiny(tmp_path / "m", Tiny(shards=2))
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(SourceError, match=r"model-00002-of-00002\.safetensors"):
        load(folder)


def test_float64_names_the_way_out(tmp_path):
    folder = write_tiny(tmp_path / "m", TINY)
    write_weights(folder, {name: tensor.astype(np.float64) for name, tensor in TINY.tensors().items()})
    with pytest.raises(SourceError, match="F64, which MLX does not read") as caught:
        load(folder)
    assert "--dtype f32" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "mlx-lm's llama always uses silu"),
        ({"model_type": "mistral", "sliding_window": 8}, "mlx-lm's mistral attends to all"),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, "mlx-lm's qwen2 attends to all"),
    ],
)
def test_settings_that_mlx_lm_ignores_are_said(tmp_path, changes, message):
    folder = write_tiny(tmp_path / "m", TINY)
    edit_config(folder, **changes)
    assert message in " ".join(open_checkpoint(str(folder)).warnings)
    edit_config(folder, **{key: None for key in changes if key != "model_type"})
    assert open_checkpoint(str(folder)).warnings == ()


def test_damaged_weights(tmp_path):
    folder = write_tiny(tmp_path / "m", TINY)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(SourceError, match=r"model\.safetensors"):
        load(folder)
    weights.unlink()
    with pytest.raises(UserError, match=r"no weights; expected model\*\.safetensors"):
        load(folder)


def test_missing_tensor_and_missing_tokenizer(tmp_path):
    folder = write_tiny(tmp_path / "m", TINY, tokenizer=False)
    with pytest.raises(UserError, match="no tokenizer files"):
        load(folder)
    tensors = TINY.tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_weights(folder, tensors)
    with pytest.raises(SourceError, match=r"these weights \(ValueError: Missing 1 parameters"):
        load(folder)


def test_unknown_format_version(packed, tmp_path):
    trellis = json.loads((packed / "config.json").read_text())["trellis"]
    folder = copy(packed, tmp_path)
    edit_config(folder, trellis=trellis | {"format_version": 3})
    with pytest.raises(ArtifactError, match="format_version: expected 1 or 2, found 3"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 2}, r"q_proj\.weight: config.json promises U32 \[128, 8\], the file holds U32 \[128, 12\]"),
        ({"rows": 129}, r"q_proj\.weight: config.json promises"),
        ({"window": 13}, "expected 12, 14 or 16"),
        ({"extra": 1}, "expected the keys"),
    ],
)
def test_spec_and_tensors_disagree(packed, tmp_path, change, message):
    folder = copy(packed, tmp_path)
    trellis = json.loads((folder / "config.json").read_text())["trellis"]
    trellis["modules"]["model.layers.0.self_attn.q_proj"] |= change
    edit_config(folder, trellis=trellis)
    with pytest.raises(ArtifactError, match=message):
        load(folder)


def test_a_spec_of_another_shape_than_the_model(packed, tmp_path):
    folder = copy(packed, tmp_path)
    trellis = json.loads((folder / "config.json").read_text())["trellis"]
    spec = trellis["modules"]["model.layers.0.self_attn.o_proj"]
    spec["axis"] = 0  # square, so the tensors still fit
    spec_up = trellis["modules"]["model.layers.0.mlp.up_proj"]
    spec_up["axis"] = 0
    edit_config(folder, trellis=trellis)
    with pytest.raises(
        ArtifactError, match=r"up_proj: expected \[out, in\] = \[200, 128\], its spec says \[128, 200\]"
    ):
        load(folder)


def copy(folder, tmp_path):
    import shutil

    return shutil.copytree(folder, tmp_path / "copy")
