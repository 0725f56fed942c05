"""qwen3_5 with its tower through every verb, against transformers, stock mlx-lm and its converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import CONFIG_MAPPING, AutoModel

from tests.support.command import run
from tests.support.conversions import convert
from tests.support.family_parity import mean_kl, mlx_logits
from tests.support.stock import stock_convert, stock_generate
from tests.support.tensors import raw_tensors
from tests.support.tiny_hybrid import (
    EXPERTS,
    VOCAB,
    build,
    change,
    fused,
    tensors_of,
    write_hybrid,
    write_text_alone,
)
from tqtool.artifact.verify import verify_artifact
from tqtool.calibration.calibrate import CalibrationRequest, calibrate, plan_calibration
from tqtool.errors import SourceError
from tqtool.formats.dtypes import DType
from tqtool.mathx.signs import sign_vector
from tqtool.pipeline.convert import ConvertRequest, plan_convert
from tqtool.pipeline.trellis import TrellisRequest, check_trellis, plan_trellis
from tqtool.runtime.load import load
from tqtool.solve.trellis import TrellisOptions
from tqtool.transform.plan import plan_identity, plan_rotation
from tqtool.transform.tower import tower_tensors

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TOKENS = [int(token) for token in np.random.default_rng(3).integers(3, VOCAB, 40)]
TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid") / "source")


def dense(source: Path, out: Path, seed: int | None = None) -> Path:
    plan_convert(ConvertRequest(source=str(source), out=out, rotation_seed=seed, dtype=DType.F32)).run()
    return out


def served(folder: Path, **options: Any) -> Any:
    """Logits of any artifact as the runtime serves it."""
    import mlx.core as mx

    return np.array(load(folder, **options).model(mx.array(TOKENS)[None])[0].astype(mx.float32), np.float64)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_folded_is_the_source_in_both_stacks(tmp_path: Path, tied: bool) -> None:
    source = write_hybrid(tmp_path / "source", tied=tied)
    with torch.no_grad():
        expected = build(tied=tied)(torch.tensor([TOKENS])).logits[0].double().numpy()
    plain = mlx_logits(dense(source, tmp_path / "dense"), TOKENS)
    # Both in float32; a recurrence over 40 tokens and 5 layers: 1e-5 is usual.
    assert np.abs(plain - expected).max() < 1e-4 * np.abs(expected).max()
    assert 0 < mean_kl(expected, mlx_logits(dense(source, tmp_path / "rotated", 42), TOKENS)) <= 1e-5


def test_bytes_are_those_of_mlx_lm_convert_and_the_tower_is_kept(source: Path, tmp_path: Path) -> None:
    """mlx-lm leaves the tower out, and stores gains and convolutions as ours."""
    convert(source, tmp_path / "ours")
    stock_convert([(source, tmp_path / "stock", {"quantize": True, "q_bits": 4, "q_group_size": 64})])
    ours, stock = raw_tensors(tmp_path / "ours"), raw_tensors(tmp_path / "stock")
    assert {name: ours[name] for name in stock} == stock
    tower = {name.replace("vision_tower.", "model.visual."): ours[name] for name in ours.keys() - stock.keys()}
    expected = {name: raw for name, raw in raw_tensors(source).items() if ".visual." in name}
    patch = "model.visual.patch_embed.proj.weight"  # a convolution's channels, last as mlx-vlm stores them
    kind, shape, data = expected[patch]
    turned = np.frombuffer(data, np.float32).reshape(shape).transpose(0, 2, 3, 4, 1)
    expected[patch] = (kind, turned.shape, turned.tobytes())
    assert tower == expected
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["vision_config"]["depth"] == 1


def test_what_the_tower_writes_is_rotated_with_the_stream_and_nothing_else_of_it(source: Path, tmp_path: Path) -> None:
    rotated = tensors_of(dense(source, tmp_path / "rotated", 42))
    before = tensors_of(source)
    n = 128
    hadamard = np.array([[(-1) ** bin(i & j).count("1") for j in range(n)] for i in range(n)]) / np.sqrt(n)
    turn = sign_vector(42, n, lane=0)[:, None] * hadamard
    for part in ("weight", "bias"):
        expected = turn.T @ before[f"model.visual.merger.linear_fc2.{part}"].astype(np.float64)
        assert np.abs(rotated[f"vision_tower.merger.linear_fc2.{part}"] - expected).max() < 1e-5
    others = [name for name in before if ".visual." in name and "linear_fc2" not in name.replace("blocks", "")]
    assert len(others) > 10
    for name in others:
        expected = before[name].transpose(0, 2, 3, 4, 1) if before[name].ndim == 5 else before[name]
        assert np.array_equal(rotated[name.replace("model.visual.", "vision_tower.")], expected)


def test_the_tower_is_repeated_where_optiq_looks_for_it(
    source: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    out = convert(source, tmp_path / "out", rotation_seed=42).out
    inside = raw_tensors(out)
    file = out / "optiq" / "optiq_vision.safetensors"
    tower = {name: raw for name, raw in inside.items() if name.startswith("vision_tower.")}
    assert {name: np.asarray(array).tobytes() for name, array in load_file(file).items()} == {
        name: raw[2] for name, raw in tower.items()
    }
    stated = json.loads((out / "config.json").read_text())["optiq_vision"]
    assert stated == {"sidecar": "optiq/optiq_vision.safetensors", "dtype": "float32", "n_tensors": len(tower)}
    good = {check.name: check for check in verify_artifact(out, depth="none").checks}
    assert good["sidecar"].status == "pass"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    bad = {check.name: check for check in verify_artifact(out, depth="none").checks}
    assert "other values than in the shards" in bad["sidecar"].problems[0]
    alone = plan_convert(ConvertRequest(source=str(source), out=tmp_path / "alone", vision_sidecar=False))
    alone.run()
    assert not (tmp_path / "alone" / "optiq").exists()
    assert "optiq_vision" not in json.loads((tmp_path / "alone" / "config.json").read_text())
    plain = dense(source, tmp_path / "dense")
    again = plan_convert(ConvertRequest(source=str(plain), out=tmp_path / "again", vision_sidecar=False))
    assert "optiq_vision" in again.checkpoint.config
    assert "optiq_vision" not in again.config  # a file of the source's folder, which is not taken along
    told = run(capsys, monkeypatch, "convert", source, tmp_path / "x", "--dry-run").out
    assert "--no-vision-sidecar leaves optiq/optiq_vision.safetensors out" in told


def test_a_tower_stored_as_mlx_does_is_kept_as_it_is(source: Path, tmp_path: Path) -> None:
    once = dense(source, tmp_path / "once")
    assert raw_tensors(dense(once, tmp_path / "twice")) == raw_tensors(once)


SEAM = "model.visual.merger.linear_fc2.weight"
PATCHES = "model.visual.patch_embed.proj.weight"


@pytest.mark.parametrize(
    ("tensors", "vision", "message"),
    [
        ({SEAM: None}, {}, rf"missing tensors: {SEAM}"),
        (
            {"model.visual.merger.linear_fc2.bias": None},
            {},
            r"missing tensors: model\.visual\.merger\.linear_fc2\.bias",
        ),
        ({}, {"depth": 2}, r"missing tensors: model\.visual\.blocks\.1\.norm1\.weight, .* and 4 more"),
        ({}, {"depth": 10**9}, "depth 1000000000: the checkpoint holds 21 tensors of a vision tower"),
        ({}, {"depth": None}, r"vision_config\.depth: expected a positive integer, found None"),
        ({}, {"out_hidden_size": 64}, r"out_hidden_size 64: expected 128, the text model's hidden_size"),
        ({}, {"num_position_embeddings": 25}, r"pos_embed\.weight: expected \[25, 32\], found \[16, 32\]"),
        ({SEAM: (64, 128)}, {}, rf"{SEAM}: expected \[128, 128\], found \[64, 128\]"),
        ({PATCHES: (32, 96)}, {}, rf"{PATCHES}: expected \[32, 3, 2, 4, 4\], found \[32, 96\]"),
        ({"model.visual.blocks.0.attn.qkv.weight": (32, 32)}, {}, r"expected \[96, 32\], found \[32, 32\]"),
        (
            {"model.visual.deepstack_merger_list.0.norm.bias": (32,)},
            {},
            "no rule claims: model.visual.deepstack_merger",
        ),
    ],
)
def test_a_damaged_tower_is_refused(
    source: Path, tensors: dict[str, Any], vision: dict[str, Any], message: str
) -> None:
    shapes, config = described(source)
    shapes = {name: shape for name, shape in (shapes | tensors).items() if shape is not None}
    for plan in (plan_identity, plan_rotation):
        with pytest.raises(SourceError, match=message):
            plan(shapes, config | {"vision_config": config["vision_config"] | vision})


def described(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Shapes of all tensors of ``folder``, and its config.json."""
    shapes = {name: array.shape for name, array in tensors_of(folder).items()}
    return shapes, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "mixture"])
def test_the_towers_tensors_are_those_that_transformers_makes(experts: bool) -> None:
    """With every size a number of its own, so that none stands for another."""
    sizes = {"depth": 3, "hidden_size": 40, "intermediate_size": 56, "patch_size": 6, "temporal_patch_size": 5}
    sizes |= {"spatial_merge_size": 3, "num_position_embeddings": 49, "out_hidden_size": 24, "in_channels": 4}
    kind = CONFIG_MAPPING["qwen3_5_moe" if experts else "qwen3_5"]
    vision = kind(vision_config={**sizes, "num_heads": 4}).vision_config
    with torch.device("meta"):
        tower = AutoModel.from_config(vision)
    assert dict(tower_tensors(sizes)) == {name: tuple(value.shape) for name, value in tower.state_dict().items()}


def test_the_text_model_alone_is_read_as_transformers_saves_it(tmp_path: Path) -> None:
    """mlx-lm has no ``qwen3_5_text``: the artifact says ``qwen3_5``, which it reads without a tower too."""
    source = tmp_path / "source"
    model = write_text_alone(source)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].double().numpy()
    plain = dense(source, tmp_path / "plain")
    assert json.loads((plain / "config.json").read_text())["model_type"] == "qwen3_5"
    assert np.abs(mlx_logits(plain, TOKENS) - expected).max() < 1e-4 * np.abs(expected).max()
    assert 0 < mean_kl(expected, mlx_logits(dense(source, tmp_path / "rotated", 42), TOKENS)) <= 1e-5
    assert verify_artifact(tmp_path / "rotated", depth="load").is_good
    request = CalibrationRequest(source=str(source), out=tmp_path / "h", text=TEXT, rows=2, context=24, rotation_seed=1)
    assert calibrate(plan_calibration(request)).model_type == "qwen3_5"
    assert np.abs(served(source) - expected).max() < 1e-4 * np.abs(expected).max()


def test_gains_after_reload_are_the_planned_ones(source: Path, tmp_path: Path) -> None:
    """One where a gain was folded; 1 + w of the source where it acts inside a head; never two, which a loader would
    make of a convolution in the other layout."""
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    before = tensors_of(source)
    for seed in (None, 42):
        model, _ = load_model(dense(source, tmp_path / str(seed), seed), strict=True)
        held = {path: np.array(value) for path, value in tree_flatten(model.parameters())}
        for path, value in held.items():
            if not path.endswith(("norm.weight", "layernorm.weight")):
                continue
            own = before[path.replace("language_model.model.", "model.language_model.")]
            inner = path.endswith(("q_norm.weight", "k_norm.weight"))
            expected = own if "linear_attn" in path else 1 + own if inner or seed is None else np.ones_like(own)
            assert np.array_equal(value, expected), path


@pytest.mark.parametrize("spelling", ["mlx", "text alone"])
def test_every_spelling_gives_the_same_folded_text(source: Path, tmp_path: Path, spelling: str) -> None:
    first = tensors_of(dense(source, tmp_path / "first", 42))
    other = write_hybrid(tmp_path / "other")
    if spelling == "mlx":  # what our own conversion writes is a source again
        change(other, tensors_of(dense(source, tmp_path / "plain")))
    else:
        text = {name.replace("model.language_model.", "model."): t for name, t in tensors_of(source).items()}
        change(other, {name: t for name, t in text.items() if ".visual." not in name})
    second = tensors_of(dense(other, tmp_path / "second", 42))
    for name in second:
        # 1 + w is rounded to float32 before the fold, or not.
        assert np.abs(first[name] - second[name]).max() <= 1e-5 * np.abs(first[name]).max(), name
    assert {name for name in first if not name.startswith("vision_tower.")} == {
        name for name in second if not name.startswith("vision_tower.")
    }


def test_solved_and_coded_forms_load_in_stock_mlx_lm_and_generate(
    source: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    request = CalibrationRequest(
        source=str(source), out=tmp_path / "hessians", text=TEXT, rows=4, context=64, rotation_seed=42
    )
    info = calibrate(plan_calibration(request))
    readers = {tuple(name.rpartition(".")[2] for name in record.modules) for record in info.inputs}
    assert ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a") in readers
    assert ("out_proj",) in readers
    expected = mlx_logits(dense(source, tmp_path / "dense"), TOKENS)
    convert(source, tmp_path / "gptq", hessians=tmp_path / "hessians", rotation_seed=42)
    common: dict[str, Any] = {"source": str(source), "modules": ("all",), "hessians": tmp_path / "hessians"}
    for form in ("packed", "fake-quant"):
        job = plan_trellis(TrellisRequest(out=tmp_path / form, options=TrellisOptions(k=4), form=form, **common))
        job.run(check=lambda folder, job=job: check_trellis(job, folder, "forward"))
    answers = stock_generate([tmp_path / "gptq", tmp_path / "fake-quant"], TOKENS)
    assert all(answer["finite"] and answer["tokens"] for answer in answers.values())
    for form in ("gptq", "fake-quant", "packed"):
        assert mean_kl(expected, served(tmp_path / form)) < 1.0
    packed = json.loads((tmp_path / "packed" / "config.json").read_text())["trellis"]["modules"]
    assert "language_model.model.layers.0.linear_attn.in_proj_qkv" in packed
    assert not any(name.endswith(("in_proj_a", "in_proj_b")) for name in packed)
    answer = run(capsys, monkeypatch, "generate", tmp_path / "packed", "--prompt", "a", "--max-tokens", 4, "--json")
    assert json.loads(answer.out)["new_tokens"] == 4


def test_only_layers_of_full_attention_grow_with_the_text(source: Path) -> None:
    from tqtool.pipeline.inspection import inspect_model

    report = inspect_model(str(source))
    assert report.sizes.kv_cache_bytes_per_token == 2 * 2 * 2 * 32 * 2  # k and v, two layers, two heads, bf16
    assert all(row.possible for row in report.verbs)


def test_decays_keep_their_type(source: Path, tmp_path: Path) -> None:
    plan_convert(ConvertRequest(source=str(source), out=tmp_path / "half", dtype=DType.BF16)).run()
    kinds = {name: raw[0] for name, raw in raw_tensors(tmp_path / "half").items()}
    assert {kind for name, kind in kinds.items() if name.endswith("A_log")} == {"F32"}
    assert {kind for name, kind in kinds.items() if not name.endswith("A_log")} == {"BF16"}


def test_a_companion_is_left_out_and_said(source: Path, tmp_path: Path) -> None:
    other = write_hybrid(tmp_path / "other")
    change(other, tensors_of(source) | {"mtp.fc.weight": np.zeros((128, 256), np.float32)})
    job = plan_convert(ConvertRequest(source=str(other), out=tmp_path / "out"))
    assert any("mtp.fc.weight (multi-token-prediction companion" in note for note in job.plan.notes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"full_attention_interval": 4}, "layer_types calls layer 1 'full_attention'"),
        ({"full_attention_interval": 0}, "full_attention_interval: expected a positive integer, found 0"),
        ({"linear_num_value_heads": None}, "linear_num_value_heads: expected a positive integer"),
        ({"linear_conv_kernel_dim": 3}, r"conv1d\.weight: expected \[256, 1, 3\], found \[256, 1, 4\]"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = change(write_hybrid(tmp_path / "source"), **settings)
    with pytest.raises(SourceError, match=message):
        plan_convert(ConvertRequest(source=str(folder), out=tmp_path / "out"))


def test_one_tensor_in_two_spellings_is_refused(source: Path, tmp_path: Path) -> None:
    other = write_hybrid(tmp_path / "other")
    tensors = tensors_of(source)
    change(other, tensors | {"language_model.lm_head.weight": tensors["lm_head.weight"]})
    with pytest.raises(SourceError, match="one tensor in two spellings"):
        plan_convert(ConvertRequest(source=str(other), out=tmp_path / "out"))


# ------------------------------------------------------------------------------------------------------ experts
@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3_5_moe as published: gate and up of all experts in one tensor, which stock mlx-lm reads."""
    folder = write_hybrid(tmp_path_factory.mktemp("mixture") / "source", experts=True)
    return change(folder, fused(tensors_of(folder)))


def test_a_mixture_folded_is_the_source_in_both_stacks(mixture: Path, tmp_path: Path) -> None:
    with torch.no_grad():
        expected = build(experts=True)(torch.tensor([TOKENS])).logits[0].double().numpy()
    plain = mlx_logits(dense(mixture, tmp_path / "dense"), TOKENS)
    assert np.abs(plain - expected).max() < 1e-4 * np.abs(expected).max()
    assert 0 < mean_kl(expected, mlx_logits(dense(mixture, tmp_path / "rotated", 42), TOKENS)) <= 1e-5


def test_every_spelling_of_experts_gives_the_same_bytes(mixture: Path, tmp_path: Path) -> None:
    apart = write_hybrid(tmp_path / "apart", experts=True)
    first, second = dense(mixture, tmp_path / "first", 42), dense(apart, tmp_path / "second", 42)
    assert raw_tensors(first) == raw_tensors(second)


def test_a_spelling_that_mlx_lm_does_not_read_is_calibrated_too(mixture: Path, tmp_path: Path) -> None:
    apart = write_hybrid(tmp_path / "apart", experts=True)
    made = []
    for source in (mixture, apart):
        out = tmp_path / f"hessians-{len(made)}"
        request = CalibrationRequest(source=str(source), out=out, text=TEXT, rows=2, context=24, rotation_seed=1)
        made.append(calibrate(plan_calibration(request)))
    assert made[0].inputs == made[1].inputs
    assert made[0].files == made[1].files


def test_bytes_of_a_mixture_are_those_of_mlx_lm_convert(mixture: Path, tmp_path: Path) -> None:
    """Routers, and what decides how much of the shared expert counts, at eight bits in both."""
    convert(mixture, tmp_path / "ours")
    stock_convert([(mixture, tmp_path / "stock", {"quantize": True, "q_bits": 4, "q_group_size": 64})])
    ours, stock = raw_tensors(tmp_path / "ours"), raw_tensors(tmp_path / "stock")
    assert {name: ours[name] for name in stock} == stock
    assert {name.split(".")[0] for name in ours.keys() - stock.keys()} == {"vision_tower"}


def test_a_mixture_is_calibrated_coded_and_generates(
    mixture: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    request = CalibrationRequest(
        source=str(mixture), out=tmp_path / "hessians", text=TEXT, rows=4, context=64, rotation_seed=42
    )
    info = calibrate(plan_calibration(request))
    assert [len(record.tokens) for record in info.routing] == [EXPERTS["num_experts"]] * 5
    assert all(sum(record.tokens) == 4 * 64 * 2 for record in info.routing)
    shared = "language_model.model.layers.0.mlp.shared_expert.gate_proj"
    assert info.input_of(shared) == info.input_of("language_model.model.layers.0.mlp.gate")
    job = plan_trellis(
        TrellisRequest(
            source=str(mixture),
            out=tmp_path / "packed",
            options=TrellisOptions(k=4),
            modules=("all",),
            hessians=tmp_path / "hessians",
        )
    )
    job.run(check=lambda folder: check_trellis(job, folder, "forward"))
    # A random mixture sends tokens elsewhere for any rounding, so its KL says nothing: both ways to run it agree.
    packed, expanded = served(tmp_path / "packed"), served(tmp_path / "packed", compute="expand")
    assert np.abs(packed - expanded).max() < 1e-3 * np.abs(expanded).max()
    answer = run(capsys, monkeypatch, "generate", tmp_path / "packed", "--prompt", "a", "--max-tokens", 4, "--json")
    assert json.loads(answer.out)["new_tokens"] == 4
