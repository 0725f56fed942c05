"""phi3 all the way: one projection for q, k and v, one for gate and up, calibrated, coded, verified, run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.test_trellis import expanded
from tests.support.tensors import raw_tensors
from tests.support.tiny_families import CASES, write_family
from tqtool.artifact.verify import verify_artifact
from tqtool.calibration.calibrate import CalibrationRequest, calibrate, plan_calibration
from tqtool.formats.dtypes import DType
from tqtool.formats.sensitivity import tie
from tqtool.pipeline.convert import ConvertRequest, plan_convert
from tqtool.pipeline.rules import parse_rule
from tqtool.pipeline.trellis import TrellisRequest, plan_trellis
from tqtool.solve.trellis import TrellisOptions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TEXT = Path(__file__).parents[2] / "LICENSE"
QKV, GATE_UP, DOWN = (f"model.layers.1.{part}" for part in ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """phi3 and the statistics of what its layers read."""
    folder = tmp_path_factory.mktemp("phi3")
    write_family(folder / "source", CASES["phi3"])
    request = CalibrationRequest(
        source=str(folder / "source"), out=folder / "hessians", text=TEXT, rows=16, context=64, rotation_seed=42
    )
    calibrate(plan_calibration(request))
    return folder


def trellis(work: Path, out: Path, **options: object) -> Path:
    settings = {
        "options": TrellisOptions(k=3),
        "modules": ("model.layers.1.*",),
        "hessians": work / "hessians",
        **options,
    }
    plan_trellis(TrellisRequest(source=str(work / "source"), out=out, **settings)).run()
    return out


def floats(folder: Path) -> dict[str, np.ndarray]:
    """Float32 tensors of an artifact."""
    found = raw_tensors(folder)
    return {
        name: np.frombuffer(data, np.float32).reshape(shape)
        for name, (dtype, shape, data) in found.items()
        if dtype == "F32"
    }


def test_fused_projections_are_coded_with_feedback_and_their_channels_move(work: Path, tmp_path: Path) -> None:
    packed = trellis(work, tmp_path / "packed", fold_channels=True)
    fake = trellis(work, tmp_path / "fake", fold_channels=True, form="fake-quant")
    rows = {row["module"]: row for row in json.loads((packed / "tqtool" / "manifest.json").read_text())["tensors"]}
    assert (rows[QKV]["role"], rows[GATE_UP]["role"]) == ("qkv", "gate_up")
    assert all(rows[name]["quantizer"] == "ldlq trellis k3 mul1 tile" for name in (QKV, GATE_UP, DOWN))
    assert [fold.partition(":")[0] for fold in rows[QKV]["folds"][2:]] == ["rows 288…383"]
    assert [fold.partition(":")[0] for fold in rows[GATE_UP]["folds"][2:]] == ["rows 0…319", "rows 320…639"]
    for name in (QKV, GATE_UP, DOWN):
        assert rows[name]["stats"]["proxy_loss"] < rows[name]["stats"]["proxy_loss_plain"]
    twin = raw_tensors(fake)
    for module, bits in expanded(packed).items():
        dtype, shape, data = twin[f"{module}.weight"]
        assert dtype == "F32"
        low = np.frombuffer(data, np.uint32).reshape(shape)
        assert np.array_equal((low + 0x7FFF + (low >> 16 & 1)) >> 16, bits), module
    verify_artifact(packed).require()


def test_both_halves_of_gate_up_follow_down_proj(work: Path, tmp_path: Path) -> None:
    """Only layer 1's down_proj is coded, the rest dense: the order shows in gate's rows, the scale in up's."""
    kept = ("*qkv_proj", "*o_proj", "*gate_up_proj", "*.0.mlp.*", "*.2.mlp.*", "lm_head", "model.embed_tokens")
    rules = tuple(parse_rule(f"{glob}=float") for glob in kept)
    coded = floats(trellis(work, tmp_path / "coded", form="fake-quant", options=TrellisOptions(k=4),
                           modules=("*.down_proj",), rules=rules, fold_channels=True))  # fmt: skip
    plan_convert(
        ConvertRequest(source=str(work / "source"), out=tmp_path / "rotated", dtype=DType.F32, rotation_seed=42)
    ).run()
    plain = floats(tmp_path / "rotated")
    (gate, up), (moved_gate, moved_up) = (np.split(found[f"{GATE_UP}.weight"], 2) for found in (plain, coded))
    places = {row.tobytes(): index for index, row in enumerate(gate)}
    order = [places[row.tobytes()] for row in moved_gate]
    assert sorted(order) == list(range(320))
    assert order != list(range(320))
    scale = np.linalg.norm(moved_up, axis=1) / np.linalg.norm(up[order], axis=1)
    assert np.allclose(moved_up, up[order] * scale[:, None], rtol=1e-5, atol=1e-12)
    assert scale.max() > 2 * scale.min()
    folded = plain[f"{DOWN}.weight"][:, order] / scale
    # Four bits err by .004 of a Gaussian weight; in another order or scale nothing would be left of it.
    assert np.sum((coded[f"{DOWN}.weight"] - folded) ** 2) < 0.05 * np.sum(folded**2)
    others = [name for name in plain if not name.startswith("model.layers.1.mlp.")]
    assert all(np.array_equal(plain[name], coded[name]) for name in others)


def test_gate_and_up_in_one_projection_take_one_rate() -> None:
    assert tie([QKV, GATE_UP, DOWN]) == [[QKV], [GATE_UP], [DOWN]]


def test_a_rate_of_a_fused_projection(work: Path, tmp_path: Path) -> None:
    request = TrellisRequest(
        source=str(work / "source"),
        out=tmp_path / "out",
        options=TrellisOptions(k=3),
        modules=("all",),
        k_map={"*.gate_up_proj": 2, "*.qkv_proj": 4},
    )
    labels = {row.module: row.quantizer for row in plan_trellis(request).plan.rows}
    assert labels[GATE_UP] == "trellis k2 mul1 axis1"
    assert labels[QKV] == "trellis k4 mul1 axis1"
    assert labels[DOWN] == "trellis k3 mul1 axis0"
    mlp = plan_trellis(TrellisRequest(source=str(work / "source"), out=tmp_path / "o", options=TrellisOptions(k=3)))
    coded = {row.module for row in mlp.plan.rows if "trellis" in row.quantizer}
    assert coded == {f"model.layers.{layer}.mlp.{part}_proj" for layer in range(3) for part in ("gate_up", "down")}
