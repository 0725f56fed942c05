"""The companion of qwen3_5 through convert and trellis: what is written drafts as a float64 head does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.command import run
from tests.support.companion_parity import drafts, exact_error, expected
from tests.support.family_parity import mean_kl
from tests.support.tensors import raw_tensors
from tests.support.tiny_hybrid import change, tensors_of, write_with_companion
from tests.support.tiny_models import write_tiny
from tqtool.artifact.verify import verify_artifact
from tqtool.errors import ArtifactError, NumericalError, SourceError, UserError
from tqtool.formats.dtypes import DType
from tqtool.pipeline.companion import CompanionRequest, companion_request
from tqtool.pipeline.convert import ConvertRequest, plan_convert
from tqtool.pipeline.rules import Packed
from tqtool.pipeline.trellis import TrellisRequest, plan_trellis
from tqtool.recipes.jobs import Target, plan_quantization
from tqtool.recipes.schema import read_recipe
from tqtool.runtime.drafter import load_drafter
from tqtool.runtime.load import load
from tqtool.solve.trellis import TrellisOptions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

FOUR = Packed(bits=4, group_size=64, mode="affine")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_companion(tmp_path_factory.mktemp("companion") / "source")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_companion(tmp_path_factory.mktemp("companion") / "mixture", experts=True)


def written(trunk: Path, out: Path, form: Any = "dense", *, seed: int | None = 42, **options: Any) -> Path:
    request = CompanionRequest(form=form, **{key: options.pop(key) for key in ("tap", "source") if key in options})
    kind = {"dtype": DType.F32} if "packing" not in options else {}
    plan_convert(ConvertRequest(source=str(trunk), out=out, rotation_seed=seed, mtp=request, **kind, **options)).run()
    return out


@pytest.mark.parametrize("tap", ["post_norm", "pre_norm"])
def test_folded_drafts_are_the_source_s(source: Path, tmp_path: Path, tap: Any) -> None:
    truth = expected(source, tap, is_folded=True)
    assert exact_error(source, tap) < 1e-10
    found = drafts(written(source, tmp_path / "out", tap=tap))
    assert np.abs(found - truth).max() < 1e-4 * np.abs(truth).max()  # float32 behind five layers of a recurrence
    assert json.loads((tmp_path / "out" / "mtp" / "config.json").read_text())["hidden_tap"] == tap


def test_a_companion_with_experts_drafts_as_the_source_s(mixture: Path, tmp_path: Path) -> None:
    truth = expected(mixture, "post_norm", is_folded=True)
    found = drafts(written(mixture, tmp_path / "out"))
    assert np.abs(found - truth).max() < 1e-3 * np.abs(truth).max()
    assert "layers.0.mlp.switch_mlp.gate_proj.weight" in raw_tensors(tmp_path / "out" / "mtp")


def test_without_a_rotation_nothing_is_lost(source: Path, tmp_path: Path) -> None:
    for tap in ("post_norm", "pre_norm"):
        truth = expected(source, tap, is_folded=False)
        found = drafts(written(source, tmp_path / tap, seed=None, tap=tap))
        assert np.abs(found - truth).max() < 1e-4 * np.abs(truth).max()


def test_packed_forms_draft_alike_and_are_verified(source: Path, tmp_path: Path) -> None:
    """Over one trunk, so that only the companion differs: 8 bits change little, 4 bits more."""
    dense = drafts(written(source, tmp_path / "dense"))
    divergence = {}
    for form in ("8", "4"):
        out = written(source, tmp_path / form, form)
        divergence[form] = mean_kl(dense, drafts(out))
        report = verify_artifact(out, depth="none")
        assert report.is_good
        assert any(check.name == "companion" and "companion-affine" in check.detail for check in report.checks)
        names = raw_tensors(out / "mtp")
        assert sum(name.endswith(".scales") for name in names) == 8
        assert verify_artifact(out / "mtp").is_good
    assert 0 < divergence["8"] < 1e-2 < divergence["4"] < 1


def test_it_is_bundled_with_packed_trunks(source: Path, tmp_path: Path) -> None:
    request = TrellisRequest(
        source=str(source),
        out=tmp_path / "trellis",
        options=TrellisOptions(k=4),
        mtp=CompanionRequest(form="8"),
    )
    job = plan_trellis(request)
    job.run()
    affine = written(source, tmp_path / "affine", "8", packing=FOUR)
    assert verify_artifact(tmp_path / "trellis", depth="none").is_good
    assert verify_artifact(affine, depth="forward").is_good  # stock mlx-lm does not see the folder
    for folder in (tmp_path / "trellis", affine):
        assert np.isfinite(drafts(folder)).all()
    assert raw_tensors(tmp_path / "trellis" / "mtp") == raw_tensors(affine / "mtp")


def test_a_recipe_bundles_it_with_the_artifact_and_no_candidate(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"name: a\nsource: {source}\nrotation: {{seed: 42}}\n"
        "quantize: {verb: convert, bits: 4, mtp: 8, mtp_tap: pre, vision_sidecar: false}\n"
    )
    recipe = read_recipe(path)
    job = plan_quantization(recipe, Target(out=tmp_path / "out", journal=tmp_path / "journal"))
    assert job.extras.companion is not None
    assert job.plan.companion is not None
    assert job.extras.request["mtp"] == {"form": "8", "hidden_tap": "pre_norm"}
    assert not job.extras.sidecars
    candidate = Target(out=tmp_path / "candidate", journal=tmp_path / "journal", rate=2)
    assert plan_quantization(recipe, candidate).extras.companion is None


def test_every_place_gives_the_same_companion(source: Path, tmp_path: Path) -> None:
    inside = written(source, tmp_path / "inside")
    beside_source = write_with_companion(tmp_path / "source", inside=False)
    beside = written(beside_source, tmp_path / "beside")
    named = written(source, tmp_path / "named", source=str(beside_source / "mtp"))
    foreign = written(beside_source, tmp_path / "foreign", source=str(source))
    first = tensors_of(inside / "mtp")
    for folder in (beside, named, foreign):
        other = tensors_of(folder / "mtp")
        assert other.keys() == first.keys()
        for name, array in first.items():  # 1 + w is rounded to float32 before the fold, or not
            assert np.abs(array - other[name]).max() <= 1e-5 * np.abs(array).max(), name


def test_a_folded_source_is_packed_with_its_own_companion_and_no_other(source: Path, tmp_path: Path) -> None:
    folded = written(source, tmp_path / "folded", tap="pre_norm")
    out = written(folded, tmp_path / "out", "8", seed=None, packing=FOUR)
    assert verify_artifact(out, depth="none").is_good
    assert json.loads((out / "mtp" / "config.json").read_text())["hidden_tap"] == "pre_norm"
    other = written(source, tmp_path / "other", seed=7)
    message = "carries rotations of seed 7, its trunk rotations of seed 42"
    with pytest.raises(UserError, match=message):
        written(folded, tmp_path / "refused", source=str(other / "mtp"), seed=None)
    with pytest.raises(UserError, match="carries no rotation, its trunk rotations of seed 42"):
        written(folded, tmp_path / "refused", source=str(source), seed=None)
    with pytest.raises(UserError, match="seed 7, the source trunk, before this run, carries no rotation;"):
        written(source, tmp_path / "refused", source=str(other / "mtp"), seed=7)
    with pytest.raises(UserError, match="reads the hidden state at pre_norm, --mtp-tap asks for post_norm"):
        written(folded, tmp_path / "refused", tap="post_norm", seed=None)


def test_a_companion_of_another_seed_is_neither_loaded_nor_verified(source: Path, tmp_path: Path) -> None:
    mine, other = written(source, tmp_path / "mine"), written(source, tmp_path / "other", seed=7)
    loaded = load(mine)
    with pytest.raises(UserError, match=r"seeds \[7\], its trunk \[42\]"):
        load_drafter(loaded, other / "mtp")
    with pytest.raises(UserError, match=r"seeds \[\], its trunk \[42\]"):
        load_drafter(loaded, write_with_companion(tmp_path / "plain", inside=False) / "mtp")
    shutil.rmtree(mine / "mtp")
    with pytest.raises(UserError, match="no multi-token-prediction companion"):
        load_drafter(loaded)
    shutil.copytree(other / "mtp", mine / "mtp")
    checks = {check.name: check for check in verify_artifact(mine, depth="none").checks}
    assert checks["files"].status == "fail"
    assert "seeds [7], its trunk [42]" in checks["companion"].problems[0]


@pytest.mark.parametrize("damage", ["byte", "tap", "missing"])
def test_damage_is_found(source: Path, tmp_path: Path, damage: str) -> None:
    out = written(source, tmp_path / "out", "8")
    file = out / "mtp" / ("config.json" if damage == "tap" else "model.safetensors")
    if damage == "byte":
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    elif damage == "tap":
        file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_tap": "both"}))
        with pytest.raises(ArtifactError, match="hidden_tap: expected one of post_norm, pre_norm, found 'both'"):
            load_drafter(load(out))
    else:
        file.unlink()
    checks = {check.name: check.status for check in verify_artifact(out, depth="none").checks}
    assert checks["files"] == checks["companion"] == "fail"


def test_the_plan_shows_it(source: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    asked = ("convert", source, tmp_path / "out", "-q", "--rotate-weights", "--mtp", "4", "--dry-run")
    text = run(capsys, monkeypatch, *asked).out
    assert "mtp/layers.*.mlp.down_proj" in text
    assert "companion  mtp/: 31 tensors" in text
    plan = json.loads(run(capsys, monkeypatch, *asked, "--json").out)
    assert len(plan["companion"]["rows"]) == 15
    without = json.loads(run(capsys, monkeypatch, *asked[:-3], "--dry-run", "--json").out)
    assert without["companion"] is None
    assert any("--mtp dense, 8 or 4" in hint for hint in without["hints"])
    assert any("left out: mtp." in note for note in without["notes"])
    assert not any("left out" in note for note in plan["notes"])
    added = plan["companion"]["totals"]["disk_bytes"]
    assert plan["totals"]["disk_bytes"] - without["totals"]["disk_bytes"] == added
    for key in ("source_parameters", "tensor_bytes", "bits_per_source_weight"):
        assert plan["totals"][key] == without["totals"][key]


def test_what_cannot_be_is_said(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--mtp-source and --mtp-tap without --mtp do nothing"):
        companion_request("none", "somewhere", None)
    with pytest.raises(UserError, match="--mtp '5' is unknown"):
        companion_request("5", None, None)
    with pytest.raises(UserError, match="--mtp-tap 'middle' is unknown"):
        companion_request("8", None, "middle")
    assert companion_request("8", None, "pre") == CompanionRequest(form="8", tap="pre_norm")
    llama = write_tiny(tmp_path / "llama")
    with pytest.raises(UserError, match="no tensor mtp"):
        written(llama, tmp_path / "out")
    with pytest.raises(UserError, match="model_type 'llama' has no multi-token-prediction companion"):
        written(llama, tmp_path / "out", source=str(source))
    with pytest.raises(UserError, match="holds no multi-token-prediction companion"):
        written(source, tmp_path / "out", source=str(llama))
    wrong = write_with_companion(tmp_path / "wrong", inside=False)
    for seed in (None, 42):
        with pytest.raises(UserError, match="no model but the companion of one"):
            plan_convert(ConvertRequest(source=str(wrong / "mtp"), out=tmp_path / "out", rotation_seed=seed))
    config = wrong / "mtp" / "config.json"
    found = json.loads(config.read_text())
    found["text_config"]["mtp_num_hidden_layers"] = 2
    config.write_text(json.dumps(found))
    with pytest.raises(SourceError, match=r"missing tensors: layers\.1"):
        written(wrong, tmp_path / "out")


def test_what_a_rotation_takes_from_drafts_is_said(source: Path, tmp_path: Path) -> None:
    def lines(seed: int | None, tap: Any, trunk: Path = source) -> list[str]:
        request = CompanionRequest(form="8", tap=tap)
        job = plan_convert(ConvertRequest(source=str(trunk), out=tmp_path / "out", rotation_seed=seed, mtp=request))
        return [note for note in job.plan.notes if "drafts differ" in note]

    assert lines(None, "post_norm") == lines(None, "pre_norm") == []
    (post,), (pre,) = lines(42, "post_norm"), lines(42, "pre_norm")
    assert "final gain, and one scalar per token before fc, are lost" in post
    assert "final gain is lost" in pre
    folded = written(source, tmp_path / "folded")
    manifest = json.loads((folded / "tqtool" / "manifest.json").read_text())
    assert post in manifest["notes"]
    assert lines(None, None, folded) == [post]  # of an earlier run
    job = plan_convert(
        ConvertRequest(
            source=str(source),
            out=tmp_path / "out",
            rotation_seed=1,
            dtype=DType.F32,
            mtp=CompanionRequest(form="dense"),
        )
    )
    assert job.plan.companion is not None
    assert job.plan.companion.totals.bits_per_source_weight == 32  # the trunk's final gain is none of its weights


@pytest.mark.parametrize("form", ["dense", "8"])
def test_what_cannot_be_folded_is_refused_before_anything_is_written(tmp_path: Path, form: Any) -> None:
    source = write_with_companion(tmp_path / "source")
    good = tensors_of(source)
    final = next(name for name in good if name.endswith("language_model.norm.weight"))
    change(source, good | {final: np.full_like(good[final], -1)})
    request = CompanionRequest(form=form)
    job = plan_convert(ConvertRequest(source=str(source), out=tmp_path / "out", rotation_seed=42, mtp=request))
    with pytest.raises(NumericalError, match=r"norm\.weight: the trunk's final norm .* channels, the first 0;"):
        job.check_source()  # before hours of work on the trunk
    huge = {name: np.full_like(good[name], 1e30) for name in ("mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight")}
    change(source, good | huge)
    with pytest.raises(NumericalError, match=r"fc\.weight, folded: .* are inf or NaN"):
        written(source, tmp_path / "out", form)
    if form == "dense":
        change(source, good | {"mtp.fc.weight": np.full_like(good["mtp.fc.weight"], np.finfo(np.float32).max)})
        with pytest.raises(NumericalError, match=r"fc\.weight as bf16: .* are inf or NaN"):
            written(source, tmp_path / "out", seed=None, packing=None, dtype=DType.BF16)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_embedding_table_of_its_own_is_refused(tmp_path: Path) -> None:
    source = write_with_companion(tmp_path / "source")
    change(source, mtp_use_dedicated_embeddings=True)
    with pytest.raises(SourceError, match=r"mtp_use_dedicated_embeddings is True: .* an embedding table of its own"):
        written(source, tmp_path / "out")
    change(source, mtp_use_dedicated_embeddings=False)
    written(source, tmp_path / "out")
