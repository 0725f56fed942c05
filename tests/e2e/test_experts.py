"""Mixture-of-experts models through every verb: stacks hold what each expert alone would have been."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.command import run
from tests.support.conversions import convert, plan
from tests.support.stock import stock_convert
from tests.support.tensors import raw_tensors
from tests.support.tiny_experts import TinyExperts
from tests.support.tiny_models import Tiny, write_tiny, write_weights
from tqtool.artifact.reader import open_artifact
from tqtool.artifact.verify import verify_artifact
from tqtool.calibration.calibrate import CalibrationRequest, calibrate, plan_calibration
from tqtool.errors import ArtifactError, NumericalError, SourceError, UserError
from tqtool.formats.dtypes import DType
from tqtool.formats.hessians import open_calibration
from tqtool.formats.manifest import TensorRecord
from tqtool.formats.trellis import specs_from_config
from tqtool.native import trellis_expand
from tqtool.pipeline import execute
from tqtool.pipeline.calibrated import dampings_of, open_hessians
from tqtool.pipeline.convert import plan_transform
from tqtool.pipeline.rules import packed_setting
from tqtool.pipeline.trellis import TrellisRequest, check_trellis, plan_trellis
from tqtool.runtime.load import load
from tqtool.solve.gptq import AffineGptq, GptqOptions
from tqtool.solve.trellis import TrellisOptions
from tqtool.source.checkpoint import open_checkpoint
from tqtool.transform.apply import apply_folds

pytestmark = pytest.mark.usefixtures("reload_by_fork")

QWEN, MIXTRAL = TinyExperts(), TinyExperts(model_type="mixtral", layers=1, intermediate=64, experts=3)
ROUTERS = {"qwen3_moe": "mlp.gate", "mixtral": "block_sparse_moe.gate"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3_moe, one with stacked experts, a mixtral, a calibration of the first, what stock makes of them."""
    folder = tmp_path_factory.mktemp("experts")
    for name, tiny in (("qwen", QWEN), ("stacked", replace(QWEN, is_stacked=True)), ("mixtral", MIXTRAL)):
        write_tiny(folder / name, tiny)
    words = np.random.default_rng(0).integers(3, 320, 900)
    (folder / "text.txt").write_text("\n".join(f"w{word}" for word in words))
    for name, seed in (("plain", None), ("rotated", 42)):
        request = CalibrationRequest(
            source=str(folder / "qwen"),
            out=folder / name,
            text=folder / "text.txt",
            rows=6,
            context=100,
            rotation_seed=seed,
        )
        calibrate(plan_calibration(request))
    options = {"quantize": True, "q_bits": 4, "q_group_size": 64}
    stock_convert([(folder / name, folder / f"stock-{name}", options) for name in ("qwen", "mixtral")])
    return folder


def trellis(source: Path, out: Path, **options: Any) -> Path:
    job = plan_trellis(TrellisRequest(source=str(source), out=out, options=TrellisOptions(k=2), **options))
    job.run(check=None)
    return out


def record_of(folder: Path, name: str) -> TensorRecord:
    return next(record for record in open_artifact(folder).manifest.tensors if record.name == name)


def test_bytes_are_those_of_mlx_lm_convert(work, tmp_path):
    for name in ("qwen", "stacked"):
        convert(work / name, tmp_path / name)
        assert raw_tensors(tmp_path / name) == raw_tensors(work / "stock-qwen")
    hint = plan(work / "mixtral", tmp_path / "ours").plan.hints[-1]
    assert "1 routers keep 8 bits, mlx_lm.convert would pack them at 4; --rule '*.gate=bits:4' gives its bytes" in hint
    convert(work / "mixtral", tmp_path / "as stock", rules=("*.gate=bits:4",))
    assert raw_tensors(tmp_path / "as stock") == raw_tensors(work / "stock-mixtral")
    assert not any("routers" in line for line in plan(work / "qwen", tmp_path / "q").plan.hints)


@pytest.mark.parametrize("packing", [("mxfp8", 8, 32), ("affine", 8, 32), ("mxfp4", 4, 32)], ids=str)
def test_a_router_that_mlx_lm_protects_is_packed_as_there_whatever_was_asked_for(work, tmp_path, packing):
    mode, bits, group = packing
    setting = packed_setting(bits=bits, group_size=group, mode=mode)
    convert(work / "qwen", tmp_path / "ours", packing=setting)
    options = {"quantize": True, "q_bits": bits, "q_group_size": group, "q_mode": mode}
    stock_convert([(work / "qwen", tmp_path / "stock", options)])
    assert raw_tensors(tmp_path / "ours") == raw_tensors(tmp_path / "stock")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7: there are 6 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok: expected a positive integer, found 0"),
        ({"num_experts_per_tok": -1}, "num_experts_per_tok: expected a positive integer, found -1"),
        ({"num_experts_per_tok": "2"}, "num_experts_per_tok': expected a whole number, found '2'"),
        ({"norm_topk_prob": "no"}, "norm_topk_prob': expected true or false, found 'no'"),
        ({"num_local_experts": 5}, "num_experts 6, num_local_experts 5: loaders would disagree"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_any_work(work, tmp_path, settings, message):
    folder = shutil.copytree(work / "qwen", tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(SourceError, match=message):
        plan(folder, tmp_path / "out")


def test_what_transformers_takes_for_granted_is_stated(work, tmp_path):
    """mlx-lm has no defaults for these; transformers has."""
    folder = shutil.copytree(work / "qwen", tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    left_out = ("head_dim", "decoder_sparse_step", "norm_topk_prob")
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key not in left_out}))
    stated = plan(folder, tmp_path / "out").config
    assert {key: stated[key] for key in left_out} == {
        "head_dim": 32,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
    }


def test_one_layer_in_two_spellings_is_refused(work, tmp_path):
    folder = write_tiny(tmp_path / "source", QWEN)
    tensors = QWEN.tensors()
    names = [f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in range(QWEN.experts)]
    stack = np.stack([tensors.pop(name) for name in names])
    write_weights(folder, tensors | {"model.layers.0.mlp.switch_mlp.up_proj.weight": stack})
    with pytest.raises(SourceError, match="stored in two ways, stacks and a tensor an expert"):
        plan(folder, tmp_path / "out")


def test_experts_that_are_named_apart_are_shown_their_stacks(work, tmp_path):
    with pytest.raises(UserError, match="matches no module") as error:
        convert(work / "qwen", tmp_path / "out", rules=("*.experts.3.*=bits:8",))
    assert "switch_mlp.gate_proj" in error.value.hint


def test_the_manifest_names_the_channels_of_every_expert(work, tmp_path):
    folder = trellis(
        work / "qwen", tmp_path / "folded", modules=("all",), hessians=work / "rotated", fold_channels=True
    )
    record = record_of(folder, "model.layers.0.mlp.switch_mlp.down_proj.weight")
    assert len({fold for part in record.parts for fold in part.folds if "channels[" in fold}) > 1
    assert record.parts[0].folds == record.folds


def test_a_model_without_experts_is_recorded_as_before(tmp_path):
    """Files of version 1 from before there were stacks are read, and nothing of stacks is written into new ones."""
    write_tiny(tmp_path / "source", Tiny())
    convert(tmp_path / "source", tmp_path / "out")
    text = (tmp_path / "out" / "tqtool" / "manifest.json").read_text()
    assert '"parts"' not in text
    record = json.loads(text)["tensors"][0]
    assert set(record) == {
        *("name", "module", "role", "source", "source_sha256", "key", "folds", "quantizer", "shape", "parameters"),
        *("stored", "notes", "stats"),
    }
    (tmp_path / "text.txt").write_text("\n".join(f"w{3 + n % 300}" for n in range(200)))
    request = CalibrationRequest(
        source=str(tmp_path / "source"), out=tmp_path / "h", text=tmp_path / "text.txt", rows=2, context=20
    )
    calibrate(plan_calibration(request))
    body = json.loads((tmp_path / "h" / "calibration.json").read_text())
    assert "routing" not in body
    assert set(body["inputs"][0]) == {"key", "file", "modules", "width", "rows", "sinks", "dropped"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body["inputs"][3].update(wider="nothing"), "wider 'nothing' is no input"),
        (lambda body: body["inputs"][3].update(wider=body["inputs"][3]["key"]), "is no input that it can be a part of"),
        (lambda body: body["routing"][0]["tokens"].__setitem__(0, 7), r"routing of .*: \[7, "),
        (lambda body: body["inputs"][3].update(rows=1), "routing of"),
    ],
)
def test_an_edited_calibration_that_contradicts_itself_is_refused(work, tmp_path, change, message):
    folder = shutil.copytree(work / "plain", tmp_path / "edited")
    body = json.loads((folder / "calibration.json").read_text())
    assert body["inputs"][3]["wider"] == body["routing"][0]["router"]
    change(body)
    (folder / "calibration.json").write_text(json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    with pytest.raises(ArtifactError, match=message):
        open_calibration(folder)


def test_a_calibration_that_fails_at_once_leaves_nothing(work, tmp_path):
    folder = write_tiny(tmp_path / "source", QWEN)
    tensors = QWEN.tensors()
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"][0, 0] = np.nan
    write_weights(folder, tensors)
    request = CalibrationRequest(source=str(folder), out=tmp_path / "h", text=work / "text.txt", rows=2, context=20)
    with pytest.raises(NumericalError, match="up_proj"):
        calibrate(plan_calibration(request))
    assert not (tmp_path / "h").exists()


@pytest.mark.parametrize(("name", "tiny"), [("qwen", QWEN), ("mixtral", MIXTRAL)])
def test_a_router_keeps_eight_bits_unless_asked(work, tmp_path, name, tiny):
    router = f"model.layers.0.{ROUTERS[tiny.model_type]}"
    bits = {}
    for label, rules in (("default", ()), ("asked", (f"{router}=bits:3",))):
        convert(work / name, tmp_path / label, rules=rules)
        bits[label] = json.loads((tmp_path / label / "config.json").read_text())["quantization"][router]["bits"]
    assert bits == {"default": 8, "asked": 3}
    trellis(work / name, tmp_path / "coded", modules=("*",))
    config = json.loads((tmp_path / "coded" / "config.json").read_text())
    assert router not in config["trellis"]["modules"]
    assert config["quantization"][router]["bits"] == 8


def test_gptq_solves_each_expert_under_its_own_hessian(work, tmp_path):
    result = convert(work / "qwen", tmp_path / "gptq", hessians=work / "plain")
    checkpoint = open_checkpoint(str(work / "qwen"))
    plan = plan_transform(checkpoint, rotation_seed=None)
    hessians = open_hessians(work / "plain", checkpoint, plan, sink_weight=32.0)
    stack = plan.output("model.layers.0.mlp.switch_mlp.down_proj.weight")
    stored = open_artifact(tmp_path / "gptq")
    found = {part: stored.read(f"{stack.module}.{part}") for part in ("weight", "scales", "biases")}
    for index, part in enumerate(stack.parts):
        weight = apply_folds(part, lambda name: checkpoint.tensors[name].read())
        options = GptqOptions(
            bits=4, group_size=64, dtype=DType.BF16, grid="search", dampings=dampings_of(part, hessians.rows(part))
        )
        hessian = hessians.hessian(hessians.moments(str(part.module)))
        alone = AffineGptq(options=options, hessian=hessian).run(part.name, weight).tensors
        for name, array in zip(found, alone.values(), strict=True):
            assert np.array_equal(found[name][index], array), (index, name)
    record = record_of(tmp_path / "gptq", stack.name)
    assert [part.source for part in record.parts] == [part.source for part in stack.parts]
    assert all(part.stats["error_rows"] > 0 and part.key for part in record.parts)
    assert (record.source, record.key, record.stats) == (None, None, {})
    assert result.manifest.notes == open_artifact(tmp_path / "gptq").manifest.notes


def test_packed_carrier_and_fake_quant_hold_the_same_experts(work, tmp_path):
    packed = trellis(work / "qwen", tmp_path / "packed", modules=("all",), hessians=work / "rotated")
    dense = trellis(work / "qwen", tmp_path / "dense", modules=("all",), hessians=work / "rotated", form="fake-quant")
    one, two = open_artifact(packed), open_artifact(dense)
    spec = specs_from_config(dict(one.config))["model.layers.1.mlp.switch_mlp.up_proj"]
    assert (spec.experts, spec.tile) == (QWEN.experts, 16)
    words, scales = (one.read(f"model.layers.1.mlp.switch_mlp.up_proj.{part}") for part in ("weight", "scales"))
    values = two.read("model.layers.1.mlp.switch_mlp.up_proj.weight")
    for expert in range(QWEN.experts):
        served = trellis_expand(words[expert], scales[expert], spec.matrix)
        assert np.array_equal(served.astype(values.dtype), values[expert])
    job = plan_trellis(
        TrellisRequest(source=str(work / "qwen"), out=tmp_path / "carrier", options=TrellisOptions(k=2), form="carrier")
    )
    job.run(check=lambda folder: check_trellis(job, folder, "forward"))


def test_both_spellings_are_coded_alike(work, tmp_path):
    one, two = (trellis(work / name, tmp_path / name) for name in ("qwen", "stacked"))
    assert raw_tensors(one) == raw_tensors(two)
    record = record_of(two, "model.layers.0.mlp.switch_mlp.gate_proj.weight")
    width = QWEN.expert_width
    assert [part.rows for part in record.parts] == [[e * width, (e + 1) * width] for e in range(QWEN.experts)]
    assert set(record.sources()) == {record.name}


def test_a_killed_run_loses_one_expert_and_ends_in_the_same_bytes(work, tmp_path, monkeypatch):
    options: dict[str, Any] = {"modules": ("all",), "hessians": work / "rotated"}
    whole = trellis(work / "qwen", tmp_path / "whole", **options)
    made, stop = [], 12  # in the middle of layer 0's stacks
    quantize = execute.quantize

    def counting(item, *rest):
        if len(made) == stop:
            raise KeyboardInterrupt
        result = quantize(item, *rest)
        if result[1] is not None:
            made.append(item.output.name)
        return result

    monkeypatch.setattr(execute, "quantize", counting)
    with pytest.raises(KeyboardInterrupt):
        trellis(work / "qwen", tmp_path / "again", journal=tmp_path / "journal", **options)
    assert made[-1] == "model.layers.0.mlp.experts.0.up_proj.weight"
    assert len(list((tmp_path / "journal").iterdir())) == stop
    monkeypatch.setattr(execute, "quantize", quantize)
    job = plan_trellis(
        TrellisRequest(
            source=str(work / "qwen"),
            out=tmp_path / "again",
            options=TrellisOptions(k=2),
            journal=tmp_path / "journal",
            **options,
        )
    )
    assert job.run(check=None).notes == (f"{stop} tensors reused",)
    assert raw_tensors(tmp_path / "again") == raw_tensors(whole)
    manifests = [(folder / "tqtool" / "manifest.json").read_bytes() for folder in (whole, tmp_path / "again")]
    assert manifests[0] == manifests[1]


def test_experts_are_reused_one_by_one(work, tmp_path):
    """Another source of one expert: all others are taken."""
    first = trellis(work / "qwen", tmp_path / "first", modules=("all",))
    changed = write_tiny(tmp_path / "changed", QWEN)
    tensors = QWEN.tensors()
    name = "model.layers.1.mlp.experts.4.down_proj.weight"
    tensors[name][3, 5] += 1
    write_weights(changed, tensors)
    job = plan_trellis(
        TrellisRequest(
            source=str(changed), out=tmp_path / "second", options=TrellisOptions(k=2), modules=("all",), reuse=(first,)
        )
    )
    coded = sum(len(work.pieces) for work in job.works if "trellis" in work.label)
    assert job.run(check=None).notes == (f"{coded - 1} tensors reused",)
    anew = trellis(changed, tmp_path / "anew", modules=("all",))
    assert raw_tensors(tmp_path / "second") == raw_tensors(anew)


def test_generation_is_that_of_the_expanded_model(work, tmp_path):
    import mlx.core as mx

    folder = trellis(work / "qwen", tmp_path / "packed", modules=("all",))
    tokens = mx.array([[5, 9, 200, 31, 7, 3]])
    logits = [
        np.array(load(folder, compute=compute).model(tokens).astype(mx.float32)) for compute in ("packed", "expand")
    ]
    assert np.abs(logits[0] - logits[1]).max() < 1e-4 * np.abs(logits[1]).max()


def test_verify_finds_an_expert_in_another_s_place(work, tmp_path):
    folder = trellis(work / "qwen", tmp_path / "packed")
    assert verify_artifact(folder, depth="none").is_good
    artifact = open_artifact(folder)
    ref = artifact.tensors["model.layers.0.mlp.switch_mlp.up_proj.scales"]
    data = bytearray(ref.path.read_bytes())
    size = ref.nbytes // QWEN.experts
    one, two = (slice(ref.begin + e * size, ref.begin + (e + 1) * size) for e in (0, 1))
    data[one], data[two] = data[two], data[one]
    ref.path.write_bytes(data)
    assert not verify_artifact(folder, depth="none").is_good


def test_a_wrong_number_of_experts_in_config_is_refused(work, tmp_path):
    folder = trellis(work / "qwen", tmp_path / "packed")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["trellis"]["modules"]["model.layers.0.mlp.switch_mlp.up_proj"]["experts"] = 5
    path.write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"up_proj\.weight: config\.json promises U32 \[5, "):
        load(folder)


def test_an_expert_alone_cannot_have_a_rule(work, tmp_path):
    with pytest.raises(UserError, match="matches no module"):
        convert(work / "qwen", tmp_path / "out", rules=("model.layers.0.mlp.experts.3.*=bits:8",))


def test_inspect_names_experts_once(work, capsys, monkeypatch):
    answer = run(capsys, monkeypatch, "inspect", work / "qwen", "--json")
    report = json.loads(answer.out)
    packed = next(row for row in report["verbs"] if row["verb"] == "convert -q")
    assert "stacks 36 expert matrices into 6 tensors" in packed["detail"]
    assert "adds" not in packed["detail"]
