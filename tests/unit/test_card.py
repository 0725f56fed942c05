"""Model cards: hubs' own parser reads them, they say what is measured and true, and change nothing else."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.support.candidates import CONTEXT, WINDOWS, trellis_setup, write_trellis
from tests.support.command import run
from tests.support.tiny_models import Tiny
from tqtool.artifact.card import CARD_NAME, PLACE, stated_fields
from tqtool.artifact.card_check import check_card
from tqtool.artifact.model_file import MODEL_FILE, model_file
from tqtool.artifact.reader import read_manifest
from tqtool.artifact.verify import verify_artifact
from tqtool.errors import ArtifactError, UserError
from tqtool.evals.kl import score_kl
from tqtool.formats.manifest import MANIFEST_NAME, encode, with_files
from tqtool.formats.measured import MEASURED_NAME
from tqtool.formats.teacher import open_dump
from tqtool.reports.card import CardRequest, plan_card
from tqtool.runtime.load import load

SOURCE_CARD = """---
license: other
license_name: tiny
license_link: LICENSE
language:
- en
- no
tags:
- a
---
license: mit
"""


@pytest.fixture(scope="module")
def setup(tmp_path_factory: Any) -> dict[str, Path]:
    """Packed artifacts at two rates of a source with a card, and their reports."""
    folder = tmp_path_factory.mktemp("card")
    made = trellis_setup(folder, Tiny(hidden=64, intermediate=64, heads=2, kv_heads=1, layers=1), rates=())
    (made.source / CARD_NAME).write_text(SOURCE_CARD)
    found: dict[str, Path] = {}
    for k in (2, 3):
        found[f"k{k}"] = write_trellis(made.source, folder / f"k{k}", k=k)
        report = score_kl(load(found[f"k{k}"]), open_dump(made.dump), lambda done: None)
        found[f"report{k}"] = folder / f"kl{k}.json"
        found[f"report{k}"].write_text(json.dumps(asdict(report), default=str))
    return found


@pytest.fixture
def artifact(setup: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(setup["k3"], tmp_path / "moved"))


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    """Front matter and text, by the hub's parser."""
    card: Any = ModelCard((folder / CARD_NAME).read_text())
    return card.data.to_dict(), card.text


def test_every_artifact_has_one(artifact: Path) -> None:
    front, text = card_of(artifact)
    assert front == {
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "license": "other",
        "license_name": "tiny",
        "license_link": "LICENSE",
        "language": ["en", "no"],  # Norwegian, and not False
        "tags": ["mlx", "tqtool", "trellis-k3", "rotated"],
    }
    assert (artifact / "LICENSE").read_text() == "a licence text\n"
    assert f"mlx_lm.generate --model {PLACE} --trust-remote-code" in text
    assert "TQTOOL_METAL_KERNELS=1" in text
    assert f"tqtool generate {PLACE}" in text
    manifest = read_manifest(artifact)
    size = (artifact / "model.safetensors").stat().st_size
    rate = 8 * size / manifest.totals.source_parameters
    assert f"| bits per weight | {rate:.3f}: {size:,} bytes of weight files" in text
    assert f"# source, trellis-packed {rate:.2f} bits" in text
    assert f"`{manifest.source.content_sha256}`" in text
    assert "| rotation seed | 42 |" in text
    assert "fold channels" not in text, "was not asked for"
    for deviation in manifest.transforms[0].deviations:
        assert f"* {manifest.transforms[0].id}: {deviation}" in text
    assert "## Measured" not in text


def test_what_is_measured_and_stated_comes_in(setup: dict[str, Path], artifact: Path) -> None:
    before = {path: path.read_bytes() for path in artifact.rglob("*") if path.is_file()}
    request = CardRequest(
        artifact=artifact,
        results=(f"k2={setup['report2']}", f"k3={setup['report3']}"),
        base_model="org/tiny",
        place="me/tiny-k3",
    )
    plan_card(request).write()
    front, text = card_of(artifact)
    assert (front["base_model"], front["base_model_relation"]) == ("org/tiny", "quantized")
    assert front["license_name"] == "tiny", "kept from the card before"
    assert front["tags"] == ["mlx", "tqtool", "trellis-k3", "rotated"]
    report = json.loads(setup["report3"].read_text())
    row = next(line for line in text.splitlines() if "(this model)" in line)
    assert row.startswith("| **k3** (this model) |")
    assert f"{report['kl']['mean']:.4f} ±" in row
    assert "| k2 |" in text
    assert f"windows {WINDOWS}, context {CONTEXT}" in text
    assert str(artifact.parent) not in text, "no path of this machine is published"
    assert str(setup["k3"].parent) not in (artifact / MEASURED_NAME).read_text()
    assert "--model me/tiny-k3 --trust-remote-code" in text
    changed = {
        path.relative_to(artifact).as_posix()
        for path in artifact.rglob("*")
        if path.is_file() and before.get(path) != path.read_bytes()
    }
    assert changed == {CARD_NAME, MEASURED_NAME, "tqtool/manifest.json"}
    assert verify_artifact(artifact, depth="none").is_good

    plan_card(CardRequest(artifact=artifact)).write()  # without the reports: the table stays, and what was stated
    again, kept = card_of(artifact)
    assert again["base_model"] == "org/tiny"
    assert row in kept
    assert "--model me/tiny-k3 --trust-remote-code" in kept
    assert verify_artifact(artifact, depth="none").is_good


def test_scores_of_a_run_are_found_beside_it(setup: dict[str, Path], artifact: Path) -> None:
    shutil.copy(setup["report3"], artifact.parent / "kl.json")
    made = plan_card(CardRequest(artifact=artifact))
    assert "(this model)" in made.text
    assert any("kl.json, which tqtool run left there" in line for line in made.notes)
    shutil.copy(setup["report2"], artifact.parent / "kl.json")  # of other weights: not this artifact's
    assert "## Measured" not in plan_card(CardRequest(artifact=artifact)).text


def test_results_of_other_weights_are_refused(setup: dict[str, Path], artifact: Path) -> None:
    with pytest.raises(UserError, match="none of the results is about these weights"):
        plan_card(CardRequest(artifact=artifact, results=(str(setup["report2"]),)))


def test_a_licence_is_stated_not_mixed(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "apache.txt").write_text("the text\n")
    request = CardRequest(artifact=artifact, stated={"license": "apache-2.0"}, licence_file=tmp_path / "apache.txt")
    plan_card(request).write()
    front, text = card_of(artifact)
    assert front["license"] == "apache-2.0"
    assert "license_name" not in front
    assert (artifact / "LICENSE").read_text() == "the text\n"
    assert "The licence of the source, `apache-2.0`, holds" in text
    assert verify_artifact(artifact, depth="none").is_good


def test_an_edited_card_is_kept(artifact: Path) -> None:
    with (artifact / CARD_NAME).open("a") as file:
        file.write("my own words\n")
    with pytest.raises(UserError, match="was edited since tqtool wrote it"):
        plan_card(CardRequest(artifact=artifact))
    plan_card(CardRequest(artifact=artifact, force=True)).write()
    assert verify_artifact(artifact, depth="none").is_good


def test_a_module_file_of_another_version_is_renewed(artifact: Path) -> None:
    """Newer kernels come into an artifact without coding it again; what it says of itself stays true."""
    (artifact / MODEL_FILE).write_bytes(b"# an older one\n")
    manifest = with_files(read_manifest(artifact), {MODEL_FILE: b"# an older one\n"})
    (artifact / MANIFEST_NAME).write_bytes(encode(manifest))
    failed = verify_artifact(artifact, depth="load")
    assert [check.name for check in failed.checks if check.status == "fail"] == ["reload"]
    assert "--renew-module" in failed.checks[-1].problems[0]
    plan_card(CardRequest(artifact=artifact, renews_model_file=True)).write()
    assert (artifact / MODEL_FILE).read_bytes() == model_file()
    assert verify_artifact(artifact, depth="load").is_good

    config = json.loads((artifact / "config.json").read_text())
    (artifact / "config.json").write_text(json.dumps({**config, "model_file": None}))
    with pytest.raises(UserError, match="ships no module file"):
        plan_card(CardRequest(artifact=artifact, renews_model_file=True))


def test_damaged_measurements_and_ids(artifact: Path) -> None:
    (artifact / MEASURED_NAME).write_text('{"format_version": 1, "model_hash": "x", "arms": [], "conditions": []}')
    with pytest.raises(ArtifactError, match=r"measured.json: model_hash"):
        plan_card(CardRequest(artifact=artifact))
    with pytest.raises(UserError, match="--base-model tiny: expected a hub id"):
        plan_card(CardRequest(artifact=artifact, base_model="tiny"))


@pytest.mark.parametrize("text", ["no front matter\n", "---\nlicense: [\n---\n", "---\n---\n"])
def test_cards_that_hubs_do_not_read(text: str) -> None:
    with pytest.raises(UserError, match="front matter"):
        check_card(text.encode())


def test_what_a_source_states(tmp_path: Path) -> None:
    card = tmp_path / CARD_NAME
    card.write_text(SOURCE_CARD)
    assert stated_fields(card)["license"] == "other"
    for text in (
        "license: mit\n",
        "---\nlicense: mit\n",
        "---\nlicense: [\n---\n",
        "---\n- a\n---\n",
        "---\nlicense:\n---\n",
    ):
        card.write_text(text)
        assert stated_fields(card) == {}, text
    assert stated_fields(tmp_path / "missing.md") == {}


def test_a_link_into_the_source_s_repository(artifact: Path) -> None:
    """A relative link whose file did not come along leads to the source's repository, or is left out."""
    stated = {"license": "other", "license_name": "x", "license_link": "TERMS.pdf"}
    with_base = plan_card(CardRequest(artifact=artifact, stated=stated, base_model="org/tiny")).text
    assert "license_link: https://huggingface.co/org/tiny/blob/main/TERMS.pdf" in with_base
    assert "license_link" not in plan_card(CardRequest(artifact=artifact, stated=stated)).text


def test_the_command(artifact: Path, capsys: Any, monkeypatch: Any) -> None:
    before = (artifact / CARD_NAME).read_bytes()
    shown = run(capsys, monkeypatch, "card", artifact, "--base-model", "org/tiny", "--dry-run")
    assert shown.code == 0, shown.err
    assert "base_model: org/tiny" in shown.out
    assert "note: nothing measured" in shown.err
    assert (artifact / CARD_NAME).read_bytes() == before
    written = run(capsys, monkeypatch, "card", artifact, "--base-model", "org/tiny", "--json")
    assert json.loads(written.out)["card"].encode() == (artifact / CARD_NAME).read_bytes() != before
    wrong = run(capsys, monkeypatch, "card", artifact, "--license-name", "x")
    assert (wrong.code, "go with --license" in wrong.err) == (2, True)
