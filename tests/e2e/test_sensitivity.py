"""Swaps against artifacts really written, interruptions, k-maps and mixes from end to end on tiny models."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.candidates import Setup, affine_setup, trellis_setup, write_trellis
from tests.support.command import run
from tests.support.conversions import convert
from tests.support.tiny_models import Tiny
from tqtool.artifact.reader import read_manifest
from tqtool.errors import ArtifactError, UserError
from tqtool.evals.candidates import open_candidates
from tqtool.evals.kl import score_kl
from tqtool.evals.sensitivity import SensitivityRequest, measure_sensitivity, plan_sensitivity
from tqtool.evals.swap_log import log_path
from tqtool.formats.sensitivity import Sensitivity
from tqtool.formats.teacher import open_dump
from tqtool.pipeline.rules import Packed
from tqtool.runtime.load import load

ROUNDING = 1e-13
"""A swap and the written artifact go through the same float32 operations on the same inputs, so every position has the
same KL; means of 46 of them, below 16 nats, differ by the order of their sums: 46 · 16 · 2^-53."""


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return trellis_setup(tmp_path_factory.mktemp("coded"), Tiny(layers=3))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return affine_setup(tmp_path_factory.mktemp("packed"), Tiny(layers=2, tied=False))


@pytest.fixture(scope="module")
def measured(coded: Setup) -> tuple[Path, Sensitivity]:
    out = coded.source.parent / "sens.json"
    return out, measure(coded, out)


def request(setup: Setup, out: Path, **options: Any) -> SensitivityRequest:
    folders = tuple(reversed(setup.coded.values()))
    return SensitivityRequest(artifacts=folders, teacher=options.pop("teacher", setup.dump), out=out, **options)


def measure(setup: Setup, out: Path, **options: Any) -> Sensitivity:
    return measure_sensitivity(plan_sensitivity(request(setup, out, **options)))


def written_kl(folder: Path, setup: Setup) -> float:
    report = score_kl(load(folder, compute="expand"), open_dump(setup.dump), lambda windows: None)
    return report.kl.mean


# ----------------------------------------------------------------------------------------------- the measurement
@pytest.mark.parametrize("reference", ["low", "high"])
def test_a_swap_is_the_artifact_written_with_that_map(coded, tmp_path, reference):
    found = measure(coded, tmp_path / "sens.json", reference=reference)
    base = found.reference_bits
    assert base == (2 if reference == "low" else 4)
    assert found.reference_kl is not None
    assert abs(found.reference_kl.mean - written_kl(coded.coded[base], coded)) <= ROUNDING
    assert len(found.groups) == 6
    for group, bits in ((found.groups[0], 3), (found.groups[3], 2 if reference == "high" else 4), (found.groups[5], 3)):
        folder = tmp_path / f"{group.modules[0]}-{bits}"
        write_trellis(coded.source, folder, k=base, k_map=dict.fromkeys(group.modules, bits))
        value = group.values[str(bits)].mean
        swapped = found.reference_kl.mean - value if reference == "low" else found.reference_kl.mean + value
        assert abs(swapped - written_kl(folder, coded)) <= ROUNDING
        assert value != 0


def test_affine_candidates_and_the_head(packed, tmp_path):
    found = measure(packed, tmp_path / "sens.json", reference="low", include_head=True)
    assert found.protected == ["model.embed_tokens"]
    assert found.group_size == 64
    modules = [group.modules for group in found.groups]
    assert modules[-1] == ["lm_head"]
    assert ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"] in modules
    assert ["model.layers.1.self_attn.q_proj"] in modules
    assert len(modules) == 2 * 6 + 1
    for module in ("lm_head", "model.layers.1.self_attn.v_proj"):
        group = found.groups[modules.index([module])]
        rules = (f"{module}=bits:6",)
        convert(packed.source, tmp_path / module, packing=Packed(bits=3, group_size=64, mode="affine"), rules=rules)
        assert found.reference_kl is not None
        swapped = found.reference_kl.mean - group.values["6"].mean
        assert abs(swapped - written_kl(tmp_path / module, packed)) <= ROUNDING
        assert group.bits_per_weight == {"3": 3.5, "4": 4.5, "6": 6.5}


def test_what_stands_in_the_file(coded, measured):
    out, found = measured
    body = json.loads(out.read_bytes())
    assert (body["metric"], body["candidate_bits"], body["reference"]) == (
        "kl_divergence_vs_reference",
        [2, 3, 4],
        "high",
    )
    assert found.protected == ["model.embed_tokens", "lm_head"]  # the rotation unties them
    assert str(coded.source.parent) not in out.read_text()
    # A row a module, as OptiQ has it; those of a tied group add up to what was measured.
    rows = {row["layer_name"]: row for row in body["layers"]}
    tied = found.groups[0]
    assert tied.modules == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    for bits in ("2", "3", "4"):
        total = sum(rows[name]["sensitivities"][bits] for name in tied.modules)
        assert total == pytest.approx(tied.values[bits].mean, rel=1e-15)
    assert rows[tied.modules[0]]["param_count"] == 128 * 256
    manifest = read_manifest(coded.coded[3])
    sizes = [
        stored.size_bytes for record in manifest.tensors if record.module in tied.modules for stored in record.stored
    ]
    assert tied.bits_per_weight["3"] == 8 * sum(sizes) / tied.parameters
    assert found.candidates[1].manifest_sha256 is not None


# ------------------------------------------------------------------------------------------------- interruptions
def test_an_interrupted_run_ends_in_the_same_bytes(coded, measured, tmp_path):
    out, seen = tmp_path / "sens.json", []

    def stop_behind_the_third(swaps: int) -> None:
        seen.append(swaps)
        if sum(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_sensitivity(plan_sensitivity(request(coded, out)), stop_behind_the_third)
    assert not out.exists()
    with pytest.raises(UserError, match="interrupted measurement"):
        plan_sensitivity(request(coded, out))
    with pytest.raises(ArtifactError, match="of another measurement"):
        measure(coded, out, reference="low", resume=True)
    log = log_path(out)
    whole = log.read_bytes()
    log.write_bytes(whole[:-20])  # killed while it wrote the third
    seen.clear()
    measure_sensitivity(plan_sensitivity(request(coded, out, resume=True)), seen.append)
    assert seen == [2, *[1] * 10]
    assert out.read_bytes() == measured[0].read_bytes()
    assert not log.exists()
    with pytest.raises(UserError, match="exists already"):
        plan_sensitivity(request(coded, out, resume=True))
    log.write_bytes(whole)  # killed between the last two steps: the file is there, the log not yet gone
    measure(coded, out, resume=True)
    assert out.read_bytes() == measured[0].read_bytes()


@pytest.mark.parametrize(
    "change", [(b'"mean": ', b'"mean": 1'), (b'"swap": [0', b'"swap": [1'), (b'"seal"', b'"sael"')]
)
def test_an_edited_log_is_refused(coded, tmp_path, change):
    def stop(swaps: int) -> None:
        if swaps:
            raise KeyboardInterrupt

    out = tmp_path / "sens.json"
    with pytest.raises(KeyboardInterrupt):
        measure_sensitivity(plan_sensitivity(request(coded, out)), stop)
    edited = log_path(out).read_bytes().replace(*change)
    assert edited != log_path(out).read_bytes()
    log_path(out).write_bytes(edited)
    with pytest.raises(ArtifactError, match="damaged"):
        measure(coded, out, resume=True)


def test_a_dump_of_another_model_leaves_nothing_behind(coded, tmp_path):
    other = affine_setup(tmp_path / "other", Tiny(vocab=300), rates=())
    with pytest.raises(UserError, match="its tokenizer"):
        measure_sensitivity(plan_sensitivity(request(coded, tmp_path / "sens.json", teacher=other.dump)))
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_another_run_into_the_same_file_is_refused(coded, tmp_path):
    job = plan_sensitivity(request(coded, tmp_path / "sens.json"))

    def other(swaps: int) -> None:
        if swaps:
            with pytest.raises(ArtifactError, match="another run is measuring"):
                measure_sensitivity(job)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_sensitivity(job, other)


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_in_the_same_bytes(coded, measured, tmp_path):
    out = tmp_path / "sens.json"
    command = [str(Path(sys.executable).with_name("tqtool")), "sensitivity", *map(str, coded.coded.values()), str(out)]
    command += ["--teacher", str(coded.dump), "--resume"]
    chance = random.Random(5)
    for _ in range(4):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 60
            before = log_path(out).stat().st_size if log_path(out).exists() else 0
            while process.poll() is None and time.monotonic() < deadline:
                if log_path(out).exists() and log_path(out).stat().st_size > before:
                    break
                time.sleep(0.002)
            time.sleep(chance.random() * 0.05)
            process.send_signal(signal.SIGKILL)
    if log_path(out).exists() or not out.exists():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert out.read_bytes() == measured[0].read_bytes()


# -------------------------------------------------------------------------------------------------- what is refused
def test_artifacts_that_are_no_candidates(coded, packed, tmp_path):
    two, three = coded.coded[2], coded.coded[3]
    write_trellis(coded.source, tmp_path / "seed", k=3, seed=1)
    write_trellis(coded.source, tmp_path / "mixed", k=3, k_map={"*.up_proj": 4})
    write_trellis(coded.source, tmp_path / "again", k=3)
    for folders, message in (
        ([two], "expected two or more"),
        ([two, packed.coded[4]], "another source"),
        ([two, tmp_path / "seed"], "another transform"),
        ([two, tmp_path / "mixed"], "codes all that differs at one rate"),
        ([three, tmp_path / "again"], "no module is stored differently"),
        ([two, three, tmp_path / "again"], "both 3 bits"),
    ):
        with pytest.raises(UserError, match=message):
            open_candidates(folders)
    with pytest.raises(ArtifactError, match=r"has no tqtool/manifest\.json"):
        open_candidates([two, coded.source])


# ------------------------------------------------------------------------------------------------- from end to end
def test_kmap_is_measured_written_and_read(coded, measured, tmp_path, capsys, monkeypatch):
    sens, _ = measured
    artifacts = [part for folder in coded.coded.values() for part in ("--artifact", folder)]
    kmap = tmp_path / "kmap.json"
    arguments = ("kmap", sens, kmap, "--budget", "2.9", *artifacts, "--teacher", coded.dump, "--json")
    answer = run(capsys, monkeypatch, *arguments)
    assert answer.code == 0, answer.err
    report = json.loads(answer.out)
    assert report["mean_bits"] <= 2.9
    assert set(report["k"].values()) > {2}
    body = json.loads(kmap.read_text())
    assert body["k"] == report["k"]
    assert body["report"]["measured_kl"] == report["measured_kl"]
    assert report["uniform_bits"] == 2
    assert abs(report["uniform_kl"] - written_kl(coded.coded[2], coded)) <= ROUNDING
    assert (report["measured_kl"] < report["uniform_kl"]) == ("no better than all" not in answer.err)
    reuse = [part for folder in coded.coded.values() for part in ("--reuse", folder)]
    options = ["--warmup", "16", "--check", "none", "-k", "2", *reuse]
    for name, choice in (("map", ["--k-map", kmap]), ("budget", ["--k-map", sens, "--k-budget", "2.9"])):
        made = run(capsys, monkeypatch, "trellis", coded.source, tmp_path / name, *choice, *options)
        assert made.code == 0, made.err
        assert read_manifest(tmp_path / name).request["k_map"] == report["k"]
        assert abs(written_kl(tmp_path / name, coded) - report["measured_kl"]) <= ROUNDING
    assert run(capsys, monkeypatch, *arguments).code == 2
    wrong = run(
        capsys, monkeypatch, *arguments[:-3], "--teacher", coded.dump, "--force", "--artifact", tmp_path / "map"
    )
    assert (wrong.code, "codes all that differs at one rate" in wrong.err) == (2, True)


def test_a_mix_is_measured_on_the_artifacts_of_the_measurement(coded, measured, tmp_path, capsys, monkeypatch):
    two, three, four = (("--artifact", coded.coded[k]) for k in (2, 3, 4))
    other = write_trellis(coded.source, tmp_path / "other", k=1)
    dump = ("--teacher", coded.dump)
    for options, message in (
        ((*two, *three, *dump), "the 4-bit candidate is missing"),
        ((*two, *three, *four, "--artifact", other, *dump), "not one of the artifacts that were measured"),
        ((*two, *three, *four), "--artifact and --teacher belong together"),
        (dump, "--artifact and --teacher belong together"),
        (("--windows", "1"), "--windows without --teacher"),
        (("--budget", "1.5"), "--budget 1.5: leaves 1.5"),
    ):
        answer = run(capsys, monkeypatch, "kmap", measured[0], tmp_path / "map", "--budget", "2.5", *options)
        assert (answer.code, message in answer.err) == (2, True), answer.err
        assert not (tmp_path / "map").exists()


def test_a_budget_needs_a_measurement(coded, measured, tmp_path, capsys, monkeypatch):
    kmap = tmp_path / "kmap.json"
    kmap.write_text('{"k": {"*.up_proj": 2}}')
    for options, message in (
        (["--k-budget", "3"], "--k-budget without --k-map"),
        (["--k-map", kmap, "--k-budget", "3"], "its bits are decided already"),
        (["--k-map", measured[0]], "sensitivities, which need a budget"),
        (["--k-map", measured[0], "--k-budget", "1.9"], "--k-budget 1.9: leaves 1.9"),
        (["--k-map", measured[0], "--k-budget", "nan"], "expected a positive number"),
        (["--k-map", measured[0], "--k-budget", "3", "--modules", "*.up_proj"], "is not coded here"),
        (["--k-map", measured[0], "--k-budget", "3", "--no-rotate-weights"], "with seed 42, the job is identity"),
        (
            ["--k-map", measured[0], "--k-budget", "3", "--rotation-seed", "7"],
            "with seed 42, the job is rotation.llama with seed 7",
        ),
    ):
        answer = run(capsys, monkeypatch, "trellis", coded.source, tmp_path / "out", *options)
        assert (answer.code, message in answer.err) == (2, True), answer.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", [4.0, 4.3, 5.0, 6.5])
def test_the_true_bits_of_all_packed_modules_keep_the_target(packed, tmp_path, capsys, monkeypatch, target):
    sens = packed.source.parent / "sens.json"
    if not sens.exists():
        measure(packed, sens)
    out = tmp_path / "out"
    rule = "model.layers.0.self_attn.k_proj=bits:8"
    arguments = ("convert", packed.source, out, "--sensitivity", sens, "--target-bpw", target, "--rule", rule)
    answer = run(capsys, monkeypatch, *arguments, "--check", "none")
    assert answer.code == 0, answer.err
    manifest = read_manifest(out)
    rows = [record for record in manifest.tensors if record.module is not None]
    assert all(record.quantizer.startswith("affine") for record in rows)
    stored = 8 * sum(stored.size_bytes for record in rows for stored in record.stored)
    weights = sum(record.parameters for record in rows)
    assert stored <= target * weights
    assert f"{stored / weights:.4f} bits a weight, {target} asked for" in answer.err
    labels = {record.module: record.quantizer for record in rows}
    assert labels["lm_head"] == "affine6 g64"
    assert labels["model.layers.0.self_attn.k_proj"] == "affine8 g64"
    assert labels["model.embed_tokens"] == "affine3 g64"
    chosen = manifest.request["allocation"]["bits"]
    assert manifest.request["allocation"]["target_bpw"] == target
    assert {f"affine{bits} g64" == labels[name] for name, bits in chosen.items()} == {True}
    # No candidate step is smaller than the largest group, so what is left over is less than that.
    if max(chosen.values()) < 6 or min(chosen.values()) < 6:
        assert target * weights - stored < 2 * 3 * np.prod((2, 128, 256))


def test_targets_that_cannot_be_kept(packed, coded, measured, tmp_path, capsys, monkeypatch):
    sens = packed.source.parent / "sens.json"
    if not sens.exists():
        measure(packed, sens)
    for options, message in (
        (["--sensitivity", sens], "belong together"),
        (["--target-bpw", "4"], "belong together"),
        (["--sensitivity", sens, "--target-bpw", "3.5"], "--target-bpw 3.5: leaves 3."),
        (["--sensitivity", measured[0], "--target-bpw", "4"], "is trellis, which convert does not write"),
        (
            ["--sensitivity", sens, "--target-bpw", "5", "--rule", "model.layers.*=bits:4"],
            "decide every measured module",
        ),
    ):
        answer = run(capsys, monkeypatch, "convert", packed.source, tmp_path / "out", *options)
        assert (answer.code, message in answer.err) == (2, True), answer.err


@pytest.mark.slow
def test_a_recipe_spends_a_budget(packed, coded, measured, tmp_path, capsys, monkeypatch):
    sens = packed.source.parent / "sens.json"
    if not sens.exists():
        measure(packed, sens)
    for setup, path, lines, key in (
        (coded, measured[0], "verb: trellis, k: 2, warmup: 16, k_budget: 2.9", "k_map"),
        (packed, sens, "verb: convert, target_bpw: 4.5", "allocation"),
    ):
        recipe, out = tmp_path / f"{key}.yaml", tmp_path / key
        rotation = "rotation: {seed: 42}\n" if setup is coded else ""
        recipe.write_text(f"name: x\nsource: {setup.source}\n{rotation}quantize: {{{lines}, sensitivity: {path}}}\n")
        answer = run(capsys, monkeypatch, "run", recipe, out, "--json")
        assert answer.code == 0, answer.err
        assert read_manifest(out / "artifact").request[key]
        assert (out / "artifact" / "tqtool" / "sensitivity.json").read_bytes() == path.read_bytes()
        inside = (out / "artifact" / "tqtool" / "recipe.yaml").read_text()
        assert "sensitivity: sens.json" in inside
        assert str(tmp_path) not in inside


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("verb: trellis, k_budget: 3", "belong together"),
        ("verb: trellis, k_budget: 3, sensitivity: s.json, k_map: {'*': 2}", "decided already"),
        ("verb: convert, sensitivity: s.json", "belong together"),
        ("verb: convert, sensitivity: s.json, target_bpw: 0", "greater than 0"),
        ("verb: convert, sensitivity: s.json, target_bpw: 4.5", "s.json: cannot be read"),
    ],
)
def test_recipes_that_cannot_spend(coded, tmp_path, capsys, monkeypatch, lines, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: x\nsource: {coded.source}\nquantize: {{{lines}}}\n")
    answer = run(capsys, monkeypatch, "run", recipe, tmp_path / "out")
    assert (answer.code, message in answer.err) == (2, True), answer.err
    assert not (tmp_path / "out").exists()
