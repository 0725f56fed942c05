"""Sensitivity files: ours byte for byte, OptiQ's and EXL3's with what they leave out, damage, k-maps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tqtool.errors import UserError
from tqtool.formats.kmap import encode_kmap, read_kmap
from tqtool.formats.sensitivity import Candidate, Group, Sensitivity, Value, encode, tie
from tqtool.formats.sensitivity_file import read_sensitivity
from tqtool.pipeline.allocation import coded_mix, kmap_for

GAINS = {"a.q_proj": (0.0, 0.2, 0.3), "a.gate_proj": (0.0, 0.6, 0.7), "b.down_proj": (0.0, 0.1, 0.5)}
COUNTS = {"a.q_proj": 100, "a.gate_proj": 300, "a.up_proj": 100, "b.down_proj": 200}


def document(**changes: Any) -> Sensitivity:
    groups = []
    for modules, gains in zip(
        (["a.q_proj"], ["a.gate_proj", "a.up_proj"], ["b.down_proj"]), GAINS.values(), strict=True
    ):
        groups.append(
            Group(
                modules=modules,
                param_counts=[COUNTS[name] for name in modules],
                values={
                    str(bits): Value(mean=gain, standard_error=0.01)
                    for bits, gain in zip((2, 3, 4), gains, strict=True)
                },
                bits_per_weight={"2": 2.25, "3": 3.25, "4": 4.25},
            )
        )
    fields: dict[str, Any] = {
        "base_model": "tiny",
        "source_sample_sha256": None,
        "transforms": [],
        "candidate_bits": [2, 3, 4],
        "group_size": None,
        "reference": "low",
        "reference_kl": Value(mean=2.0, standard_error=0.1),
        "candidates": [
            Candidate(bits=bits, mode="trellis", group_size=None, bits_per_weight=bits + 0.25, manifest_sha256=None)
            for bits in (2, 3, 4)
        ],
        "groups": groups,
        "protected": [],
        "teacher": None,
        "tools": {},
        "notes": [],
    }
    return Sensitivity(**{**fields, **changes})


def optiq(values: dict[str, tuple[float, ...]], **changes: Any) -> dict[str, Any]:
    rows = [
        {
            "layer_name": name,
            "param_count": COUNTS[name],
            "sensitivities": {str(bits): value for bits, value in zip((4, 8), row, strict=True)},
        }
        for name, row in values.items()
    ]
    metric = "kl_divergence_vs_reference"
    return {
        "base_model": "x/y",
        "candidate_bits": [4, 8],
        "group_size": 64,
        "metric": metric,
        "layers": rows,
        **changes,
    }


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_a_file_comes_back(tmp_path):
    path = tmp_path / "sens.json"
    path.write_bytes(encode(document()))
    assert read_sensitivity(path) == document()
    assert read_sensitivity(path, reference="low") == document()
    with pytest.raises(UserError, match="was measured with reference low"):
        read_sensitivity(path, reference="high")


def test_a_reader_of_optiq_files_sees_the_same_changes(tmp_path):
    body = json.loads(encode(document()))
    theirs = {key: body[key] for key in ("base_model", "candidate_bits", "group_size", "metric", "layers")}
    found = read_sensitivity(write(tmp_path / "optiq.json", theirs))
    assert found.reference == "low"
    assert [group.modules for group in found.groups] == [group.modules for group in document().groups]
    for mine, group in zip(document().groups, found.groups, strict=True):
        for bits in (2, 3, 4):
            assert found.change(group, bits) == pytest.approx(document().change(mine, bits), rel=1e-14)


@pytest.mark.parametrize(
    ("row", "reference", "change"),
    [((0.0, 0.5), "low", -0.5), ((0.1, 0.5), "low", -0.4), ((0.5, 0.02), "high", 0.48)],
)
def test_the_direction_of_optiq_values_tells_their_sign(tmp_path, row, reference, change):
    path = write(tmp_path / "optiq.json", optiq({"a.q_proj": row}))
    found = read_sensitivity(path)
    assert found.reference == reference
    assert any(f"reference {reference}" in line for line in found.notes)
    group = found.groups[0]
    moved = 8 if reference == "low" else 4
    assert found.change(group, moved) == pytest.approx(change)
    assert group.bits_per_weight == {"4": 4.5, "8": 8.5}
    told = read_sensitivity(path, reference="high" if reference == "low" else "low")
    assert told.reference != reference
    assert not any("does not say" in line for line in told.notes)


def test_optiq_counts_are_checked(tmp_path):
    path = tmp_path / "optiq.json"
    for row in (
        {"param_count": 0},
        {"param_count": 1.5},
        {"sensitivities": {"4": 0.1}},
        {"sensitivities": {"4": 0, "8": "x"}},
    ):
        body = optiq({"a.q_proj": (0.0, 0.1)})
        body["layers"][0] |= row
        with pytest.raises(UserError, match=r"optiq\.json"):
            read_sensitivity(write(path, body))
    for change in ({"candidate_bits": [4]}, {"candidate_bits": 4}, {"candidate_bits": []}, {"group_size": 0}):
        with pytest.raises(UserError, match=r"optiq\.json"):
            read_sensitivity(write(path, optiq({"a.q_proj": (0.0, 0.1)}, **change)))


def test_optiq_values_that_tell_nothing_and_pairs(tmp_path):
    path = write(tmp_path / "optiq.json", optiq({"a.q_proj": (0.2, 0.2)}))
    with pytest.raises(UserError, match="neither rise nor fall"):
        read_sensitivity(path)
    pair = {"a.up_proj": (0.0, 0.1), "a.q_proj": (0.0, 0.1), "a.gate_proj": (0.0, 0.2)}
    found = read_sensitivity(write(path, optiq(pair)))
    assert [group.modules for group in found.groups] == [["a.q_proj"], ["a.gate_proj", "a.up_proj"]]
    assert found.groups[1].values["8"].mean == pytest.approx(0.3)
    assert found.groups[1].param_counts == [300, 100]


def exl3(**changes: Any) -> dict[str, Any]:
    groups = [
        {
            "idx": 0,
            "layers": ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"],
            "candidates": [{"dkld": -0.3, "dbits": 2000}, {"dkld": -0.4, "dbits": 4000}],
        },
        {
            "idx": 1,
            "layers": ["model.layers.0.mlp.down_proj"],
            "candidates": [{"dkld": 0.01, "dbits": 1000}, {"dkld": -0.2, "dbits": 2000}],
        },
    ]
    alts = [{"dir": "b", "bpw": 3.01}, {"dir": "c", "bpw": 4.01}]
    return {"base": {"dir": "a", "bpw": 2.01}, "alts": alts, "groups": groups, "base_kld": 0.9, **changes}


def test_an_exl3_measurement_is_low(tmp_path):
    found = read_sensitivity(write(tmp_path / "measurement.json", exl3()))
    assert (found.reference, found.candidate_bits) == ("low", [2, 3, 4])
    assert [group.param_counts for group in found.groups] == [[1000, 1000], [1000]]
    assert [found.change(group, 3) for group in found.groups] == [-0.3, 0.01]
    assert found.reference_kl == Value(mean=0.9, standard_error=None)
    # 3 bits on average over 3000 weights: 3000 above the lowest. The pair at 3 takes 2000, then down_proj's step, from
    # 2 to 4 because 3 loses, takes 2000 and no longer fits; the pair's second step (2000) is less steep.
    assert kmap_for(found, 3.0).bits == {
        "model.layers.0.mlp.up_proj": 3,
        "model.layers.0.mlp.gate_proj": 3,
        "model.layers.0.mlp.down_proj": 2,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alts": [{"bpw": 2.3}, {"bpw": 4.0}]}, "expected rising ones"),
        ({"alts": [{"bpw": 3.0}]}, "not a measurement.json"),
        ({"base_kld": "x"}, "expected a number"),
        (
            {"groups": [{"layers": ["a"], "candidates": [{"dkld": 0.0, "dbits": 5}, {"dkld": 0.0, "dbits": 11}]}]},
            "mixes",
        ),
        ({"groups": []}, "at least 1 item"),
        (
            {"groups": [{"layers": ["a"], "candidates": [{"dkld": 0.0, "dbits": 0}, {"dkld": 0.0, "dbits": 0}]}]},
            "not a",
        ),
        ({"groups": [{"layers": [], "candidates": [{"dkld": 0.0, "dbits": 5}, {"dkld": 0.0, "dbits": 10}]}]}, "not a"),
    ],
)
def test_exl3_files_that_cannot_be_read(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        read_sensitivity(write(tmp_path / "measurement.json", exl3(**change)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0.6", "0.5", "edited or damaged"),
        ('"format_version": 1', '"format_version": 2', "format_version 2"),
        ('"reference": "low"', '"reference": "mid"', "reference"),
        ('"reference": "low"', '"reference": "high"', "own bits: expected 0"),
        ('"a.up_proj"', '"a.q_proj"', "a module is in two of them"),
        ('"protected": []', '"protected": [], "protected": []', "names 'protected' twice"),
        ('"mean": 2.0', '"mean": NaN', "it holds NaN"),
        ('"notes": []', '"note": []', "notes"),
    ],
)
def test_damage_is_refused(tmp_path, old, new, message):
    path = tmp_path / "sens.json"
    text = encode(document()).decode()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=message):
        read_sensitivity(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "{}", '{"k": {}}', '{"layers": 3}', '{"layers": [3], "candidate_bits": [1]}']
)
def test_what_is_no_measurement(tmp_path, text):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"file\.json"):
        read_sensitivity(path)


def test_ties():
    names = ["l.0.mlp.down_proj", "l.0.mlp.up_proj", "l.0.mlp.gate_proj", "l.1.mlp.up_proj", "l.2.mlp.gate_proj"]
    assert tie(names) == [[names[0]], ["l.0.mlp.gate_proj", "l.0.mlp.up_proj"], [names[3]], [names[4]]]


# ------------------------------------------------------------------------------------------------------ budgets
def test_a_budget_is_a_mean_over_weights():
    # 700 weights. Gains per bit: pair .6/400 to 3; q .2/100 to 3; down .5/400 from 2 to 4 (3 lies above that line).
    assert kmap_for(document(), 2.0).bits == {"a.q_proj": 2, "a.gate_proj": 2, "a.up_proj": 2, "b.down_proj": 2}
    mix = kmap_for(document(), 3.0)
    assert mix.bits == {"a.q_proj": 4, "a.gate_proj": 3, "a.up_proj": 3, "b.down_proj": 2}
    assert mix.mean_bits == (4 * 100 + 3 * 400 + 2 * 200) / 700 <= 3.0
    assert mix.bits_per_weight == pytest.approx(mix.mean_bits + 0.25)
    assert mix.kl == pytest.approx(2.0 - 0.3 - 0.6)
    # down's step would fill the last 200 bits at .5/400 each; q's second step filled 100 of them with .1.
    assert mix.gap == pytest.approx(0.5 / 400 * 200 - 0.1)
    assert kmap_for(document(), 9.0).counts == {2: 0, 3: 0, 4: 3}
    assert kmap_for(document(), 3.0, ["a.*"]).bits == {"a.q_proj": 3, "a.gate_proj": 3, "a.up_proj": 3}
    for budget, modules, message in (
        (1.99, ["*"], "--budget 1.99: leaves 1.9900 bits"),
        (3.0, ["a.gate_proj"], "take one rate together"),
        (3.0, ["c.*"], "matches no measured module"),
        (-1.0, ["*"], "expected a positive number"),
        (float("inf"), ["*"], "expected a positive number"),
    ):
        with pytest.raises(UserError, match=message):
            kmap_for(document(), budget, modules)


def test_modules_that_were_not_measured_count_in_the_mean():
    weights = {**COUNTS, "a.o_proj": 700}
    assert coded_mix(document(), 3.0, weights, 3).bits == kmap_for(document(), 3.0).bits
    assert coded_mix(document(), 3.0, weights, 4).bits == kmap_for(document(), 2.0).bits
    with pytest.raises(UserError, match=r"leaves 1\.\d+ bits"):
        coded_mix(document(), 2.5, weights, 4)
    with pytest.raises(UserError, match="has 7 weights here, 200 there"):
        coded_mix(document(), 3.0, {**COUNTS, "b.down_proj": 7}, 3)


def test_in_both_references_the_same_curve_gives_the_same_mix():
    groups = [
        group.model_copy(
            update={
                "values": {
                    bits: Value(mean=group.values["4"].mean - value.mean, standard_error=None)
                    for bits, value in group.values.items()
                }
            }
        )
        for group in document().groups
    ]
    high = document(reference="high", groups=groups, reference_kl=Value(mean=0.5, standard_error=None))
    for budget in (2.0, 2.5, 3.0, 3.5, 4.0):
        assert kmap_for(high, budget).bits == kmap_for(document(), budget).bits
    assert kmap_for(high, 4.0).kl == 0.5
    assert kmap_for(high, 2.0).kl == pytest.approx(0.5 + 0.3 + 0.7 + 0.5)


def test_swaps_that_add_up_to_too_much_are_doubted():
    assert kmap_for(document(), 4.0).doubts() == ()
    doubtful = kmap_for(document(reference_kl=Value(mean=1.0, standard_error=None)), 4.0)
    assert "--reference high" in doubtful.doubts()[0]


def test_a_budget_above_the_highest_candidates_is_said():
    assert "highest candidate, 4 bits: the budget is not spent" in kmap_for(document(), 4.01).doubts()[0]
    assert kmap_for(document(), 3.99).doubts() == ()


# --------------------------------------------------------------------------------------------------------- k-maps
def test_a_kmap_with_a_report_is_a_kmap(tmp_path):
    path = tmp_path / "kmap.json"
    path.write_bytes(encode_kmap({"b": 3, "a.*": 2}, {"budget": 2.5}))
    assert list(read_kmap(path).items()) == [("b", 3), ("a.*", 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"k": {"a": 2, "a": 3}}', "names 'a' twice"),
        ('{"k": {"a": 2}, "k": {"a": 3}}', "names 'k' twice"),
        ('{"k": {"a": 5}}', "expected 1, 2, 3 or 4 bits"),
        ('{"k": {"a": true}}', "expected 1, 2, 3 or 4 bits"),
        ('{"k": [2]}', "module path or glob"),
        ("[1]", "expected an object"),
        ('{"k": {"a": NaN}}', "it holds NaN"),
    ],
)
def test_kmaps_that_are_refused(tmp_path, text, message):
    path = tmp_path / "kmap.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_kmap(path)
