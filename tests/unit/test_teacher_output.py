"""A dump appears whole or not at all; leftovers of dead runs go, those of living ones stay."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.interrupt import interruptions
from tqtool.artifact.output import check_writable, clear_leftovers, whole_file
from tqtool.errors import ArtifactError, NumericalError

WRITER = """
import sys, time
from pathlib import Path
from tqtool.artifact.output import whole_file
with whole_file(Path(sys.argv[1])) as (file, removed):
    file.write(b"half"); file.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


def partials(folder):
    return sorted(path.name for path in folder.iterdir() if ".partial-" in path.name)


def test_a_file_takes_its_name_at_the_end(tmp_path):
    out = tmp_path / "new" / "d"
    with whole_file(out) as (file, removed):
        file.write(b"whole")
        assert not out.exists()
        assert removed == ()
    assert [path.name for path in out.parent.iterdir()] == ["d"]
    assert out.read_bytes() == b"whole"


def test_only_what_nobody_writes_is_removed(tmp_path):
    """A writer in another process, killed the hard way, and names that are not ours."""
    out = tmp_path / "[d]*"
    command = [sys.executable, "-c", WRITER, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "writing\n"
        left = partials(tmp_path)
        (tmp_path / ".[d]*.partial-77").write_bytes(b"of an earlier version")
        (tmp_path / ".dd.partial-77").write_bytes(b"of another file")
        assert clear_leftovers(out) == (".[d]*.partial-77",)
        writer.send_signal(signal.SIGKILL)
    assert partials(tmp_path) == sorted([*left, ".dd.partial-77"])
    with whole_file(out) as (file, removed):
        assert list(removed) == left
        file.write(b"whole")
    assert partials(tmp_path) == [".dd.partial-77"]


def test_two_writers_of_one_name_do_not_share_a_file(tmp_path):
    with whole_file(tmp_path / "d") as (first, _), whole_file(tmp_path / "d") as (second, removed):
        assert removed == ()
        first.write(b"first")
        second.write(b"second")
        assert len(partials(tmp_path)) == 2
    assert (tmp_path / "d").read_bytes() == b"first"  # whose block ended last
    assert partials(tmp_path) == []


def test_a_file_that_was_taken_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    real, calls = fcntl.flock, []

    def remove_first(file, how):
        calls.append(how)
        if len(calls) == 1:
            next(tmp_path.iterdir()).unlink()
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with whole_file(tmp_path / "d") as (file, _):
        file.write(b"whole")
    assert (tmp_path / "d").read_bytes() == b"whole"


@pytest.mark.parametrize("error", [NumericalError("first"), KeyboardInterrupt("first"), OSError(errno.ENOSPC, "first")])
def test_the_first_error_is_the_one_that_is_told(tmp_path, monkeypatch, error):
    def refuse(path, **options):
        raise PermissionError(errno.EROFS, "second")

    def fail():
        with whole_file(tmp_path / "d") as (file, _):
            file.write(b"half")
            monkeypatch.setattr(Path, "unlink", refuse)
            os.dup2(os.open(os.devnull, os.O_RDONLY), file.fileno())  # closing flushes, which fails too
            raise error

    with pytest.raises(ArtifactError if isinstance(error, OSError) else type(error), match="first"):
        fail()
    monkeypatch.undo()
    assert not (tmp_path / "d").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files struck while opening
def test_a_signal_at_any_moment_leaves_nothing_or_all_of_it(tmp_path):
    def write():
        with whole_file(tmp_path / "d") as (file, _):
            file.write(b"whole")

    struck = 0
    for place in interruptions(write, "output.py", "pathlib.py"):
        struck += 1
        assert [path.name for path in tmp_path.iterdir()] in ([], ["d"]), place
        (tmp_path / "d").unlink(missing_ok=True)
    assert struck > 30


def test_a_full_disk_has_its_hint(tmp_path):
    with pytest.raises(ArtifactError, match="cannot be written") as caught, whole_file(tmp_path / "d"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.hint == "free space on that disk"
    assert list(tmp_path.iterdir()) == []


def test_the_check_leaves_nothing_and_refuses_what_cannot_be(tmp_path):
    check_writable(tmp_path / "a" / "b" / "d")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "f").write_bytes(b"")
    for out in (tmp_path / "f" / "d", tmp_path / "f" / "a" / "d", tmp_path / ("n" * 250)):
        with pytest.raises(ArtifactError, match="cannot be written"):
            check_writable(out)
