"""Recipes: what is read, what is refused and where, what ``--set`` changes, that the shipped ones are valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqtool.errors import UserError
from tqtool.recipes.schema import ConvertPart, TrellisPart, dump_recipe, read_recipe

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
GOOD = """\
name: a
source: m
rotation:
  seed: 7
calibration:
  text: t.txt
quantize:
  verb: trellis
  k: 2
  k_map:
    "*.up_proj": 3
  ldlq: true
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_defaults_are_filled_and_the_dump_reads_back(tmp_path):
    recipe = read_recipe(write(tmp_path, GOOD))
    assert isinstance(recipe.quantize, TrellisPart)
    assert (recipe.quantize.k, recipe.quantize.k_map, recipe.quantize.modules) == (2, {"*.up_proj": 3}, ["mlp"])
    assert recipe.quantize.fold_channels is False
    assert recipe.calibration is not None
    assert recipe.calibration.rows == 128
    again = tmp_path / "again.yaml"
    again.write_bytes(dump_recipe(recipe))
    assert read_recipe(again) == recipe
    assert dump_recipe(read_recipe(again)) == dump_recipe(recipe)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  k: 2", "  k: 5", r"line 9: quantize\.k: Input should be less than or equal to 4"),
        ("  k: 2", "  k: two", r"line 9: quantize\.k: Input should be a valid integer"),
        ("  k: 2", "  kk: 2", r"line 9: quantize\.kk: Extra inputs are not permitted"),
        ('    "*.up_proj": 3', '    "*.up_proj": 9', r"line 11: quantize\.k_map\.\*\.up_proj: Input should be less"),
        ("  verb: trellis", "  verb: paint", r"line 7: quantize: Input tag 'paint'"),
        ("  seed: 7", "  seed: -1", r"line 4: rotation\.seed: Input should be greater"),
        ("name: a\n", "", r"name: Field required"),
        ("calibration:\n  text: t.txt\n", "", "need a calibration section"),
        ("name: a", "name: [", "line 3: not YAML"),
        ("  ldlq: true", "  ldlq: false", "would be ignored"),
        ("  ldlq: true", "  ldlq: true\n  down_axis: in", "down_axis is for layout: axis"),
        ("  ldlq: true", "  ldlq: true\n  layout: square", r"line 13: quantize\.layout: Input should be"),
        ("  ldlq: true", "  layout: tile\n  down_axis: in", "down_axis is for layout: axis"),
        ("  ldlq: true", "  fold_channels: true", "fold_channels needs ldlq: true"),
        ("  ldlq: true", "  ldlq: true\n  fold_channels: null", r"line 13: quantize\.fold_channels: Input should be"),
        ("name: a", "name: 2024-13-45", "not YAML"),
        ("name: a", "name: " + "[" * 20_000, "not YAML"),
        (GOOD, "- 1\n", "expected fields, found list"),
        ("name: a", "name: a\nname: b", "line 2: name: given twice, first in line 1"),
        ("  k: 2", "  k: 2\n  k: 3", "line 10: k: given twice, first in line 9"),
        ('    "*.up_proj": 3', '    "*.up_proj": 3\n    "*.up_proj": 4', "line 12: *.up_proj: given twice"),
        ("  ldlq: true", "  ldlq: true\n  modules: [{a: 1, a: 2}]", "line 13: a: given twice"),
        ("  k: 2", "  k: 2\n  sink_weight: 10000000.0", "line 10: quantize.sink_weight: Input should be less"),
        ("  k: 2", "  k: 2\n  mtp: 5", r"line 10: quantize\.mtp: Input should be 'none', 'dense', 8 or 4"),
        ("  k: 2", "  k: 2\n  mtp_tap: pre", "mtp_source and mtp_tap are for mtp: dense, 8 or 4"),
        (GOOD, "", "expected fields, found NoneType"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(UserError, match=message.replace("*", r"\*") if "twice" in message else message):
        read_recipe(write(tmp_path, GOOD.replace(old, new)))


def test_set_changes_one_field(tmp_path):
    path = write(tmp_path, GOOD)
    recipe = read_recipe(path, ["quantize.k=4", "rotation=null", "evaluation.text=e.txt", "quantize.modules=[all]"])
    assert isinstance(recipe.quantize, TrellisPart)
    assert (recipe.quantize.k, recipe.rotation, recipe.quantize.modules) == (4, None, ["all"])
    assert recipe.evaluation is not None
    assert recipe.evaluation.text == "e.txt"
    for change, message in (
        ("quantize.k", "expected field=value"),
        ("quantize.k.z=1", "k has no fields"),
        ("quantize.k=9", r"--set quantize\.k=9: quantize\.k: Input should be less"),
        ("quantize={verb: paint}", r"--set quantize=\{verb: paint\}: quantize: Input tag"),
        ("quantize={verb: trellis, k: 9}", r"--set quantize=.*: quantize\.k: Input should be less"),
        ("quantize.kk=1", r"--set quantize\.kk=1: quantize\.kk: Extra inputs"),
        ("quantize.k=[", "is not YAML"),
        ("nope=1", "nope: Extra inputs"),
        ("name=2024-13-45", "is not YAML"),
        ("quantize.k_map={a: 1, a: 2}", "a: given twice"),
        ("quantize.sink_weight=.nan", "finite number"),
    ):
        with pytest.raises(UserError, match=message):
            read_recipe(path, [change])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path):
    recipe = read_recipe(path)
    assert recipe.name == path.stem
    assert isinstance(recipe.quantize, ConvertPart | TrellisPart)


def test_the_table_lists_every_shipped_recipe():
    text = (ROOT / "recipes" / "README.md").read_text()
    assert all(f"`{path.stem}`" in text for path in SHIPPED)
