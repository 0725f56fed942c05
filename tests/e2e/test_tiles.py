"""``trellis --ldlq`` in tiles and along an axis, with and without reordered channels, in all forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.test_trellis import config_of, expanded
from tests.oracles.decoder import forward
from tests.support.calibrations import calibrate_rows, write_words
from tests.support.command import Answer, run
from tests.support.tensors import all_files, raw_tensors
from tests.support.tiny_models import Tiny, uneven, write_tiny, write_weights
from tqtool.errors import UserError
from tqtool.evals.candidates import open_candidates
from tqtool.formats.hessians import InputMoments, open_calibration
from tqtool.pipeline import calibrated, coding

pytestmark = pytest.mark.usefixtures("reload_by_fork")

# Float32, so that what is kept dense is exact; ends of rows lie inside blocks.
TINY = Tiny(intermediate=192, tied=False, dtype="float32")
RAGGED = Tiny(intermediate=184, tied=False, dtype="float32", layers=1)
TOKENS = [[5, 9, 31, 7, 7, 200, 3, 11]]
KINDS = ("channels[", "outliers[")
FORMS = {"packed": (), "fake": ("--fake-quant",), "carrier": ("--carrier",)}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source of uneven channels and its calibrations: ``plain``, ``rotated``, and ``short`` of half the text."""
    folder = tmp_path_factory.mktemp("tiles")
    write_tiny(folder / "source", TINY)
    write_weights(folder / "source", uneven(TINY))
    write_words(folder / "text.txt", 1500)
    calibrate_rows(folder, "plain", rotation_seed=None)
    calibrate_rows(folder, "rotated", rotation_seed=42)
    calibrate_rows(folder, "short", rotation_seed=42, rows=5)
    return folder


@pytest.fixture
def trellis(capsys, monkeypatch, work):
    def call(out: Path, *arguments: object) -> Answer:
        return run(capsys, monkeypatch, "trellis", work / "source", out, *arguments)

    return call


@pytest.fixture
def code(trellis):
    """``trellis`` that must succeed, unchecked."""

    def call(out: Path, *arguments: object) -> Path:
        answer = trellis(out, *arguments, "--check", "none")
        assert answer.code == 0, answer.err
        return out

    return call


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    manifest = json.loads((folder / "tqtool" / "manifest.json").read_text())
    return {record["name"]: record for record in manifest["tensors"]}


def dense(folder: Path) -> dict[str, np.ndarray]:
    """Float32 tensors of an artifact."""
    return {
        name: np.frombuffer(data, np.float32).reshape(shape)
        for name, (dtype, shape, data) in raw_tensors(folder).items()
        if dtype == "F32"
    }


# ------------------------------------------------------------------------------------------------- forms and layouts
@pytest.mark.parametrize("layout", ["tile", "axis"])
@pytest.mark.parametrize("folded", [True, False], ids=["channels", "as-they-are"])
def test_all_forms_serve_the_same_model(work, code, capsys, monkeypatch, tmp_path, layout, folded):
    import mlx.core as mx
    import mlx_lm

    from tqtool.runtime.load import load

    options = ("--ldlq", work / "rotated", "-k", 3, "--modules", "mlp", "--modules", "*.o_proj")
    if layout == "axis":  # tile is the default
        options = (*options, "--layout", "axis")
    if folded:  # as they are is the default
        options = (*options, "--fold-channels")
    for form, flags in FORMS.items():
        code(tmp_path / form, *options, *flags)
        if form == "packed" or (folded and layout == "tile"):  # a stock mlx-lm each
            assert run(capsys, monkeypatch, "verify", tmp_path / form).code == 0
    packed, fake = tmp_path / "packed", tmp_path / "fake"
    specs = config_of(packed)["trellis"]
    assert specs["format_version"] == 2
    tile = 16 if layout == "tile" else 0
    assert {(spec["tile"], spec["axis"]) for spec in specs["modules"].values()} == (
        {(16, 1)} if tile else {(0, 0), (0, 1)}
    )
    request = json.loads((packed / "tqtool" / "manifest.json").read_text())["request"]
    assert (request["layout"], request["fold_channels"]) == (layout, folded)
    assert request["down_axis"] == (None if tile else "out")
    labels = {row["module"]: row["quantizer"] for row in rows_of(packed).values() if row["module"]}
    assert labels["model.layers.0.mlp.down_proj"] == f"ldlq trellis k3 mul1 {'tile' if tile else 'axis0'}"
    for row in rows_of(packed).values():
        assert any("channels[" in fold for fold in row["folds"]) == (folded and ".mlp." in row["name"])
        if "ldlq" in row["quantizer"]:
            is_fed = bool(tile) or row["module"].endswith("down_proj")  # 128 inputs lie within one block of axis 1
            assert row["stats"]["proxy_loss"] < row["stats"]["proxy_loss_plain"] or not is_fed
            assert not (is_fed and row["notes"])

    assert {name: row["stats"] for name, row in rows_of(fake).items()} == {
        name: row["stats"] for name, row in rows_of(packed).items()
    }
    twin = dense(fake)
    for module, bits in expanded(packed).items():
        low = twin[f"{module}.weight"].view(np.uint32)
        assert np.array_equal((low + 0x7FFF + (low >> 16 & 1)) >> 16, bits), module
    found = {
        (form, compute): np.array(load(tmp_path / form, compute=compute).model(mx.array(TOKENS)))
        for form, compute in (("packed", "packed"), ("packed", "expand"), ("fake", "expand"), ("carrier", "expand"))
    }
    spread = found["fake", "expand"].std()
    # The source is float32 and so is the twin: sums in another order are all that differs.
    assert np.abs(found["packed", "packed"] - found["fake", "expand"]).max() < 1e-4 * spread
    assert np.abs(found["packed", "expand"] - found["fake", "expand"]).max() < 1e-4 * spread
    # 8 bits over some 5 σ of a group: .0057 σ a weight, independent over the inputs, for 8 modules one after another.
    assert 0 < (found["carrier", "expand"] - found["fake", "expand"]).std() < 0.0057 * 8 * spread
    stock, _ = mlx_lm.load(str(packed), trust_remote_code=True)
    assert type(stock.model.layers[0].mlp.down_proj).__module__ == "custom_model"
    stock.set_dtype(mx.float32)
    assert np.abs(np.array(stock(mx.array(TOKENS))) - found["packed", "packed"]).max() < 1e-4 * spread


@pytest.mark.parametrize("layout", ["tile", "axis"])
def test_the_same_request_gives_the_same_bytes(work, code, tmp_path, layout):
    options = ("--ldlq", work / "rotated", "-k", 2, "--layout", layout, "--fold-channels")
    for name, threads in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        code(tmp_path / name / "out", *options, "--threads", threads)
    assert all_files(tmp_path / "a" / "out") == all_files(tmp_path / "b" / "out")


def test_tiles_need_no_hessians_and_reach_into_the_last_channel(work, trellis, capsys, monkeypatch, tmp_path):
    """11 and a half tiles of hidden channels: the last column of down_proj and the last row of gate_proj are padded."""
    from tqtool.runtime.load import load

    source = write_tiny(tmp_path / "ragged", RAGGED)
    for form in ("packed", "fake"):
        arguments = ("-k", 4, "--layout", "tile", *FORMS[form])
        answer = run(capsys, monkeypatch, "trellis", source, tmp_path / form, *arguments)
        assert answer.code == 0, answer.err
    rows = rows_of(tmp_path / "packed")
    assert rows["model.layers.0.mlp.down_proj.weight"]["quantizer"] == "trellis k4 mul1 tile"
    assert rows["model.layers.0.mlp.down_proj.weight"]["stats"]["padded_weights"] == 8 * 128
    assert rows["model.layers.0.mlp.gate_proj.weight"]["stats"]["padded_weights"] == 8 * 128
    assert not any("channels[" in fold for row in rows.values() for fold in row["folds"])
    import mlx.core as mx

    found = [np.array(load(tmp_path / form).model(mx.array(TOKENS))) for form in ("packed", "fake")]
    assert np.abs(found[0] - found[1]).max() < 1e-4 * found[1].std()


# ------------------------------------------------------------------------------------------------- the fold itself
def shortened_sinks(moments: InputMoments) -> np.ndarray:
    """Sinks that are longer than two ordinary rows in the root mean square, shortened to that."""
    sinks = moments.sinks.astype(float)
    longest = 2 * np.sqrt(np.sum(np.diag(moments.matrix).astype(float)))
    return np.stack([sink * min(1, longest / np.linalg.norm(sink)) for sink in sinks])


def expected_channels(work: Path, basis: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Order and scale of a layer, from the source and the stored moments, in the test's own words."""
    down = uneven(TINY)[f"model.layers.{layer}.mlp.down_proj.weight"].astype(np.float64)
    norms = np.linalg.norm(down, axis=0)
    scale = (norms / np.prod(norms ** (1 / len(norms)))).astype(np.float32)
    moments = open_calibration(work / basis).moments(f"model.layers.{layer}.mlp.down_proj")
    curvature = moments.rows * np.diag(moments.matrix).astype(float) + 32 * (shortened_sinks(moments) ** 2).sum(0)
    return np.argsort(-curvature * scale.astype(float) ** 2), scale


def test_the_folded_model_is_the_source(work, code, tmp_path):
    """Only layer 0's down_proj is coded, all else is dense: with the source's own in its place, the same logits."""
    name = "model.layers.0.mlp.down_proj"
    others = [
        module for module, row in ((row["module"], row) for row in rows_of_source(code, work, tmp_path)) if module
    ]
    rules = [part for module in others if module != name for part in ("--rule", f"{module}=float")]
    options = ("--no-rotate-weights", "--ldlq", work / "plain", "-k", 4, "--modules", name, "--fake-quant")
    weights = dense(code(tmp_path / "out", *options, *rules, "--fold-channels"))
    source = uneven(TINY)
    order, scale = expected_channels(work, "plain", 0)
    stem = "model.layers.0.mlp"
    assert np.array_equal(weights[f"{stem}.gate_proj.weight"], source[f"{stem}.gate_proj.weight"][order])
    scaled = source[f"{stem}.up_proj.weight"] * scale[:, None]
    assert np.allclose(weights[f"{stem}.up_proj.weight"], scaled[order], rtol=1e-6, atol=0)
    untouched = [key for key in source if not key.startswith(stem)]
    assert all(np.array_equal(weights[key], source[key]) for key in untouched)
    folded = source[f"{name}.weight"][:, order] / scale[order]
    coded = weights[f"{name}.weight"]
    assert np.sum((coded - folded) ** 2) < 0.05 * np.sum(folded**2)
    exact = {key: value.astype(np.float64) for key, value in weights.items()} | {f"{name}.weight": folded}
    tokens = np.array(TOKENS[0])
    config = config_of(work / "source")
    logits = forward({key: value.astype(np.float64) for key, value in source.items()}, config, tokens)
    assert np.abs(forward(exact, config, tokens) - logits).max() < 1e-5 * np.abs(logits).max()
    wrong = exact | {f"{name}.weight": source[f"{name}.weight"].astype(np.float64)}
    assert np.abs(forward(wrong, config, tokens) - logits).max() > 0.05 * np.abs(logits).max()


def rows_of_source(code, work: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """Rows of an artifact of the source: the names of its modules."""
    return list(rows_of(code(tmp_path / "names", "-k", 1, "--modules", "*.0.mlp.down_proj")).values())


def test_the_loss_of_the_manifest_is_the_loss_in_the_source_s_order(work, code, tmp_path):
    """What was coded under reordered moments is put back and judged under the stored ones, sinks 32 times."""
    options = ("--no-rotate-weights", "--ldlq", work / "plain", "-k", 3, "--modules", "*.down_proj", "--fake-quant")
    folder = code(tmp_path / "out", *options, "--fold-channels")
    for layer in range(TINY.layers):
        name = f"model.layers.{layer}.mlp.down_proj"
        order, scale = expected_channels(work, "plain", layer)
        served = dense(folder)[f"{name}.weight"].astype(np.float64)
        restored = np.empty_like(served)
        restored[:, order] = served * scale[order]
        error = restored - uneven(TINY)[f"{name}.weight"]
        moments = open_calibration(work / "plain").moments(name)
        sinks = shortened_sinks(moments)
        hessian = (moments.rows * moments.matrix.astype(float) + 32 * sinks.T @ sinks) / (moments.rows + len(sinks))
        stats = rows_of(folder)[f"{name}.weight"]["stats"]
        assert stats["proxy_loss"] == pytest.approx(np.einsum("rc,cd,rd->", error, hessian, error), rel=1e-4)


def test_channels_help_where_they_differ(work, code, tmp_path, monkeypatch):
    """Outlier columns that leave the range of the code cost most of it; taming them is the default in tiles."""
    losses = {}
    for name, flags in (("with", ("--fold-channels",)), ("tamed", ()), ("without", ())):
        if name == "without":  # planted: columns stay as long as they are
            monkeypatch.setattr(coding, "tame_outliers", lambda norms: None)
        rows = rows_of(code(tmp_path / name, "--ldlq", work / "rotated", "-k", 3, *flags))
        losses[name] = {
            key: row["stats"]["proxy_loss"] for key, row in rows.items() if key.endswith("down_proj.weight")
        }
    for better in ("with", "tamed"):
        assert all(losses[better][key] < 0.9 * losses["without"][key] for key in losses[better])


def test_where_a_sink_is_massive_the_order_stays(work, trellis, tmp_path, monkeypatch):
    """The longest sinks of layer 0 are 1.7 ordinary rows long, those of layer 1 2.6: between them only one is kept."""
    monkeypatch.setattr(calibrated, "MASSIVE", 2.0)
    answer = trellis(tmp_path / "out", "-k", 2, "--ldlq", work / "rotated", "--fold-channels")
    assert "note: 1 of 2 MLPs keep the order of their channels: their sinks are massive" in answer.err
    folds = {
        key: row["folds"] for key, row in rows_of(tmp_path / "out").items() if key.endswith("mlp.down_proj.weight")
    }
    found = [[kind in str(folds[f"model.layers.{n}.mlp.down_proj.weight"]) for n in (0, 1)] for kind in KINDS]
    assert found == [[True, False], [False, True]]  # tamed instead, as without the option
    monkeypatch.setattr(calibrated, "MASSIVE", 1.0)
    answer = trellis(tmp_path / "none", "-k", 2, "--ldlq", work / "rotated", "--fold-channels")
    assert answer.code == 2
    assert "--fold-channels does nothing: no down_proj is coded under a Hessian without massive sinks" in answer.err


def test_outlier_columns_are_tamed_in_tiles(work, code, tmp_path):
    """With and without Hessians, and only there: rows of up and columns of down say so, gate has nothing to do."""
    for name, flags, tamed in (
        ("tile", ("--layout", "tile"), True),
        ("ldlq", ("--ldlq", work / "rotated"), True),
        ("axis", ("--layout", "axis"), False),
    ):
        rows = rows_of(code(tmp_path / name, "-k", 2, *flags))
        marked = {key.split(".")[-2] for key, row in rows.items() if any("outliers[" in fold for fold in row["folds"])}
        assert marked == ({"up_proj", "down_proj"} if tamed else set())


def test_gate_and_up_that_stay_affine_follow(work, code, tmp_path):
    """GPTQ of an output does not depend on the others: the same codes, moved; up's scales are multiplied."""
    options = ("--ldlq", work / "rotated", "-k", 3, "--modules", "*.down_proj")
    plain = code(tmp_path / "plain", *options, "--layout", "axis")  # no columns tamed
    mixed = code(tmp_path / "mixed", *options, "--fold-channels")
    one, two = raw_tensors(plain), raw_tensors(mixed)
    for layer in range(TINY.layers):
        order, scale = expected_channels(work, "rotated", layer)
        for part in ("gate_proj", "up_proj"):
            name = f"model.layers.{layer}.mlp.{part}"
            assert rows_of(mixed)[f"{name}.weight"]["quantizer"] == "gptq affine6 g64"
            words = [np.frombuffer(raw[f"{name}.weight"][2], np.uint32).reshape(192, -1) for raw in (one, two)]
            scales = [np.frombuffer(raw[f"{name}.scales"][2], np.float32).reshape(192, -1) for raw in (one, two)]
            if part == "gate_proj":
                assert np.array_equal(words[1], words[0][order])
                assert np.array_equal(scales[1], scales[0][order])
            else:
                # Rounding of scaled float32 weights moves a code here and there, which feedback then spreads.
                assert np.mean(words[1] == words[0][order]) > 0.9
                close = np.isclose(scales[1], (scales[0] * scale[:, None])[order], rtol=1e-3)
                assert close.mean() > 0.9
    others = [key for key in one if ".mlp." not in key]
    assert all(one[key] == two[key] for key in others)


def test_a_down_proj_that_is_not_coded_keeps_its_order(work, code, tmp_path):
    rules = ("--rule", "*.0.mlp.down_proj=bits:8,group:64")
    options = ("--ldlq", work / "rotated", "-k", 2)
    rows = rows_of(code(tmp_path / "rule", *options, *rules, "--fold-channels"))
    folded = {name for name, row in rows.items() if any("channels[" in fold for fold in row["folds"])}
    assert folded == {f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert rows["model.layers.0.mlp.down_proj.weight"]["quantizer"] == "gptq affine8 g64"
    plain = rows_of(code(tmp_path / "plain", *options, *rules))
    for part in ("gate", "up", "down"):
        name = f"model.layers.0.mlp.{part}_proj.weight"
        assert rows[name]["stored"] == plain[name]["stored"]


# ------------------------------------------------------------------------------------------------- reuse and swaps
def test_other_channels_are_other_tensors(work, code, trellis, tmp_path):
    """Another text gives another order: nothing of the MLP is taken, even gate_proj, whose own Hessian is left out."""
    options = ("-k", 2, "--modules", "*.down_proj", "--rule", "*.gate_proj=float", "--rule", "*.up_proj=float")
    first = code(tmp_path / "first", *options, "--ldlq", work / "rotated", "--fold-channels")
    keys = {}
    for name, extra in {
        "same": ("--ldlq", work / "rotated", "--fold-channels"),
        "text": ("--ldlq", work / "short", "--fold-channels"),
        "unfolded": ("--ldlq", work / "rotated"),
    }.items():
        code(tmp_path / name, *options, *extra, "--reuse", first)
        keys[name] = {name: row["key"] for name, row in rows_of(tmp_path / name).items()}
        assert all_files(tmp_path / name) == all_files(code(tmp_path / f"{name}-anew", *options, *extra))
    old = {name: row["key"] for name, row in rows_of(first).items()}
    downs = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(TINY.layers)]
    assert all(keys["same"][name] == old[name] is not None for name in downs)
    assert all(keys[other][name] != old[name] for other in ("text", "unfolded") for name in downs)


def test_the_channels_alone_change_the_key(work):
    from dataclasses import replace

    from tqtool.pipeline.plan import Work
    from tqtool.pipeline.reuse import tensor_key
    from tqtool.solve.trellis import TrellisOptions, TrellisPacked
    from tqtool.transform.folds import Channels, FoldChannels
    from tqtool.transform.outputs import OutputTensor

    order = np.arange(256, dtype=np.int32)
    one = Channels(order=order, scale=np.ones(256, np.float32))
    quantizer = TrellisPacked(options=TrellisOptions(k=2), axis=1, tile=True)
    op = FoldChannels(channels=one, axis="output", is_scaled=False)
    output = OutputTensor(name="m.weight", source="m.weight", shape=(256, 32), ops=(op,), module="m")

    def key(op: FoldChannels | None) -> str | None:
        work = Work(output=replace(output, ops=() if op is None else (op,)), quantizer=quantizer, stored=())
        return tensor_key(work, lambda name: "0" * 64)

    others = [
        None,
        replace(op, channels=replace(one, order=order[::-1].copy())),
        replace(op, channels=replace(one, scale=np.full(256, 2, np.float32))),
        replace(op, is_scaled=True),
        replace(op, axis="input"),
    ]
    assert key(op) == key(replace(op, channels=Channels(order=order.copy(), scale=one.scale.copy())))
    assert len({key(op), *map(key, others)}) == 6


def test_artifacts_of_other_channels_are_no_candidates(work, code, tmp_path):
    """A down_proj swapped into a model of another order would read the wrong channels, and nothing would say so."""
    two = code(tmp_path / "two", "-k", 2, "--ldlq", work / "rotated", "--fold-channels")
    three = code(tmp_path / "three", "-k", 3, "--ldlq", work / "rotated", "--fold-channels")
    assert len(open_candidates([two, three]).artifacts) == 2
    for name, options in (
        ("text", ("--ldlq", work / "short", "--fold-channels")),
        ("plain", ("--ldlq", work / "rotated")),
    ):
        other = code(tmp_path / name, "-k", 3, *options)
        with pytest.raises(UserError, match=r"mlp\..*_proj is folded in another way"):
            open_candidates([two, other])
