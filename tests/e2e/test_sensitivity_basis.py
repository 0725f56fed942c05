"""What a measurement is of, against what it is spent on: a difference that one may want is said, never silent."""

from __future__ import annotations

import pytest

from tests.support.candidates import Setup, affine_setup, trellis_setup
from tests.support.command import run
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.formats.sensitivity_file import read_sensitivity
from tqtool.source.checkpoint import open_checkpoint
from tqtool.source.fingerprint import fingerprint

TEACHER, WEIGHTS, AFFINE = "the teacher is not the source", "measured on other weights than tuned", "on affine candidat"


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return trellis_setup(tmp_path_factory.mktemp("coded"), Tiny())


def test_a_teacher_that_is_not_the_source(coded, tmp_path, capsys, monkeypatch):
    other = affine_setup(tmp_path / "other", Tiny(seed=5), rates=())
    artifacts = [coded.coded[2], coded.coded[3]]
    for dump, said in ((coded.dump, False), (other.dump, True)):
        out = tmp_path / f"{said}.json"
        answer = run(capsys, monkeypatch, "sensitivity", *artifacts, out, "--teacher", dump, "--windows", "1")
        assert (answer.code, TEACHER in answer.err) == (0, said), answer.err
        assert [note[: len(TEACHER)] for note in read_sensitivity(out).notes] == [TEACHER] * said
        given = [part for folder in artifacts for part in ("--artifact", folder)]
        answer = run(capsys, monkeypatch, "kmap", out, tmp_path / "m", "--budget", "9", *given, "--teacher", dump)
        assert (answer.code, TEACHER in answer.err) == (0, said), answer.err
        (tmp_path / "m").unlink()


def test_what_was_measured_and_what_is_made_of_it(coded, tmp_path, capsys, monkeypatch):
    """Another fine-tune of equal shape, and rates measured on rounding."""
    write_tiny(tmp_path / "tuned", Tiny(seed=5))
    packed = affine_setup(tmp_path / "packed", Tiny(), rates=(3, 4))
    for setup, bits in ((coded, (2, 3)), (packed, (3, 4))):
        sens, folders = setup.source.parent / "sens.json", [setup.coded[each] for each in bits]
        answer = run(capsys, monkeypatch, "sensitivity", *folders, sens, "--teacher", setup.dump, "--windows", "1")
        assert answer.code == 0, answer.err
        assert read_sensitivity(sens).source_sample_sha256 == fingerprint(open_checkpoint(str(setup.source)))
    plain = ["--modules", "all", "--no-rotate-weights", "-k", "3"]
    for verb, source, found, options, said in (
        ("trellis", coded.source, coded, ["--k-budget", "2.5"], set()),
        ("trellis", tmp_path / "tuned", coded, ["--k-budget", "2.5"], {WEIGHTS}),
        ("trellis", packed.source, packed, ["--k-budget", "3.5", *plain], {AFFINE}),
        ("convert", packed.source, packed, ["--target-bpw", "4.3"], set()),
        ("convert", tmp_path / "tuned", packed, ["--target-bpw", "4.3"], {WEIGHTS}),
    ):
        flag = "--k-map" if verb == "trellis" else "--sensitivity"
        sens = found.source.parent / "sens.json"
        answer = run(capsys, monkeypatch, verb, source, tmp_path / "out", flag, sens, *options, "--dry-run")
        assert answer.code == 0, answer.err
        assert {text for text in (TEACHER, WEIGHTS, AFFINE) if text in answer.out + answer.err} == said, answer.err
