"""A family is whole when every step of CONTRIBUTING's list is done; each that is not is named here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.peer.test_plan_modules import PLANNED
from tests.property.test_folds import FOLDED
from tests.support.tiny_families import CASES, TinyFamily
from tqtool.transform import families
from tqtool.transform.families import FAMILIES, Family

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def matrix() -> Iterator[ModuleType]:
    path = ROOT / "benchmarks" / "family_matrix.py"
    spec = importlib.util.spec_from_file_location("family_matrix", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["family_matrix"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["family_matrix"]


def undone(name: str, family: Family, readme: str) -> list[str]:
    """Steps of the list that are missing for a family; a family that cannot be rotated has no folds to test."""
    rotates = family.rotation_refusal is None
    steps = {
        "FOLDED in tests/property/test_folds.py": not rotates or any(kind == name for kind, _ in FOLDED),
        "PLANNED in tests/peer/test_plan_modules.py": not rotates or any(kind == name for kind, _ in PLANNED),
        "a case in tests/support/tiny_families.py": any(case.model_type == name for case in CASES.values()),
        "its name in the README's limits": name in readme,
    }
    return [step for step, is_done in steps.items() if not is_done]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_step_is_done(name: str) -> None:
    limits = (ROOT / "README.md").read_text().partition("## Limits")[2]
    assert undone(name, FAMILIES[name], limits) == []


def test_a_family_without_any_step_is_told_all_of_them() -> None:
    assert len(undone("new", Family(model_type="new"), "llama, mistral")) == 4
    assert len(undone("new", Family(model_type="new", rotation_refusal="post-norms"), "llama, mistral")) == 2


def test_the_page_has_a_row_of_every_case_and_every_refusal(matrix: ModuleType) -> None:
    assert matrix.page_problems((ROOT / "docs" / "families.md").read_text()) == []


def test_what_the_page_lacks_is_named(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "families.md").read_text()
    before = set(matrix.page_problems(text))
    monkeypatch.setitem(CASES, "llama 9", TinyFamily(model_type="llama", what="a variant"))
    monkeypatch.setitem(FAMILIES, "new", Family(model_type="new"))
    monkeypatch.setitem(families.REFUSED_ROTATION, "old", "a reason of its own")
    problems = [problem for problem in matrix.page_problems(text) if problem not in before]
    assert len(problems) == 3
    assert "no row of case 'llama 9'" in problems[0]
    assert "no case of 'new'" in problems[1]
    assert "a reason of its own" in problems[2]
