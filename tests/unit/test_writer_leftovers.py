"""What a dead process, a signal or another writer leaves of an artifact, and who may clear it away."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.interrupt import interruptions
from tests.support.tensors import all_files, raw_tensors
from tests.support.written import only_entry, planned, write_all
from tqtool.artifact import leftovers as leftovers_module
from tqtool.artifact.leftovers import Hold, clear_leftovers, final_path
from tqtool.artifact.writer import ArtifactWriter
from tqtool.errors import ArtifactError, UserError
from tqtool.formats.manifest import MANIFEST_NAME


def dead_pid() -> int:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return int(done.stdout)


def test_partial_of_a_dead_writer_is_removed(tmp_path: Path) -> None:
    """Dead is whose lock can be taken; the number in the name may be anybody's in another container."""
    names = (
        f".out.partial-{dead_pid()}",
        f".out.partial-{os.getpid()}",
        ".out.partial-1.2",
        ".other.partial-999999999",
    )
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    writer = write_all(tmp_path / "out", planned(2))
    assert writer.notes == [f"removed {name}, left by a run that was killed" for name in sorted(names[:3])]
    assert only_entry(tmp_path) == sorted([names[3], "out"])


HOLDER = """
import sys
from pathlib import Path
from tqtool.artifact.leftovers import Hold
hold = Hold.take(Path(sys.argv[1]))
print(hold is not None, flush=True)
sys.stdin.read()
"""


def test_partial_of_a_live_writer_is_left_alone_whatever_its_number(tmp_path: Path) -> None:
    """As from another container, where this number is alive; and killed there, it is dead here."""
    live = tmp_path / f".out.partial-{dead_pid()}"
    live.mkdir()
    command = [sys.executable, "-c", HOLDER, str(live)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert write_all(tmp_path / "out", planned(2)).notes == []
        assert only_entry(tmp_path) == [live.name, "out"]
        holder.kill()
        holder.wait()
        assert clear_leftovers(tmp_path / "out") == [f"removed {live.name}, left by a run that was killed"]


def test_two_writers_of_one_number(tmp_path: Path) -> None:
    """Two containers on one disk count alike: each has a folder of its own and the first to commit has the name."""
    out = tmp_path / "out"
    with ArtifactWriter(out, planned(2)) as first, ArtifactWriter(out, planned(3)) as second:
        assert first.folder != second.folder
        assert second.notes == []
        second.write("t0", np.zeros(3, np.float32))
        first.write("t0", np.zeros(2, np.float32))
        first.commit()
        with pytest.raises(ArtifactError, match="out: cannot be written"):
            second.commit()
    assert raw_tensors(out)["t0"][1] == (2,)
    assert only_entry(tmp_path) == ["out"]


def test_two_overwriting_writers(tmp_path: Path) -> None:
    """The second waits for the first to be done with the name, then replaces what that one made."""
    out = tmp_path / "out"
    (out / "tqtool").mkdir(parents=True)
    (out / MANIFEST_NAME).write_bytes(b"old")
    script = f"""
from pathlib import Path
import numpy as np
from tests.support.written import planned
from tqtool.artifact.writer import ArtifactWriter
with ArtifactWriter(Path({str(out)!r}), planned(3), overwrite=True) as writer:
    writer.write("t0", np.zeros(3, np.float32))
    print("ready", flush=True)
    input()
    writer.commit()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        with ArtifactWriter(out, planned(2), overwrite=True) as writer:
            writer.write("t0", np.zeros(2, np.float32))
            writer.add_bytes(MANIFEST_NAME, b"new")
            assert other.stdout.readline() == "ready\n"
            writer.commit()
            other.stdin.write("go\n")
            other.stdin.flush()
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(timeout=0.5)  # until this writer lets go
        assert other.wait(timeout=60) == 0
    assert raw_tensors(out)["t0"][1] == (3,)
    assert only_entry(tmp_path) == ["out"]


def test_an_artifact_that_is_being_replaced_is_not_restored(tmp_path: Path) -> None:
    old = tmp_path / f".out.replaced-{dead_pid()}"
    old.mkdir()
    hold = Hold.take(old)
    assert hold is not None
    assert clear_leftovers(tmp_path / "out") == []
    hold.release()
    assert clear_leftovers(tmp_path / "out") == ["restored out, whose replacement was killed"]


def test_an_overwrite_whose_last_step_fails_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (out / "tqtool").mkdir(parents=True)
    (out / MANIFEST_NAME).write_bytes(b"old")
    honest = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if "partial" in path.name:
            raise OSError(errno.EIO, "no")
        return honest(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(ArtifactError, match="out: cannot be written: no"):
        write_all(out, planned(2), overwrite=True)
    assert all_files(tmp_path) == {f"out/{MANIFEST_NAME}": b"old"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files struck while opening
def test_a_signal_at_any_moment_leaves_nothing_or_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # hundreds of artifacts
    tensors = planned(3, 5)
    out = tmp_path / "out"
    struck = whole = 0
    for place in interruptions(lambda: write_all(out, tensors), "writer.py", "leftovers.py", "pathlib.py"):
        struck += 1
        found = only_entry(tmp_path)
        assert found in ([], ["out"]), place
        if found:  # struck after the rename
            whole += 1
            assert len(load_file(out / "model.safetensors")) == 2
            shutil.rmtree(out)
    assert struck > 100
    assert 0 < whole < struck


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files struck while opening
def test_a_signal_at_any_moment_of_an_overwrite_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # hundreds of overwrites
    out = tmp_path / "out"

    def write(text: bytes) -> None:
        with ArtifactWriter(out, planned(2), overwrite=True) as writer:
            writer.write("t0", np.zeros(2, np.float32))
            writer.add_bytes(MANIFEST_NAME, text)
            writer.commit()

    write(b"old")
    seen = set()
    for place in interruptions(lambda: write(b"new"), "writer.py", "leftovers.py", "pathlib.py"):
        assert all(name == "out" or ".replaced-" in name for name in only_entry(tmp_path)), place
        clear_leftovers(out)
        assert only_entry(tmp_path) == ["out"], place
        assert len(load_file(out / "model.safetensors")) == 1, place
        seen.add((out / MANIFEST_NAME).read_bytes())
        write(b"old")
    assert seen == {b"old", b"new"}


def test_an_overwrite_keeps_what_another_put_there_meanwhile(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ArtifactWriter(out, planned(2), overwrite=True) as writer:
        writer.write("t0", np.zeros(2, np.float32))
        out.mkdir()
        (out / "theirs").write_bytes(b"x")
        with pytest.raises(UserError, match="not empty and not an artifact of tqtool"):
            writer.commit()
    assert all_files(tmp_path) == {"out/theirs": b"x"}


def test_a_folder_cleared_between_its_making_and_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, victims = leftovers_module.fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if not victims:
            victims.append(tmp_path / f".out.partial-{os.getpid()}")
            victims[0].rmdir()
        honest(handle, how)

    monkeypatch.setattr(leftovers_module.fcntl, "flock", late)
    with ArtifactWriter(tmp_path / "out", planned(2)) as writer:
        assert victims
        assert writer.folder.is_dir()
        assert Hold.take(writer.folder) is None


def test_without_locks_leftovers_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(handle: int, how: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks")

    monkeypatch.setattr(leftovers_module.fcntl, "flock", unsupported)
    stale = tmp_path / f".out.partial-{os.getpid()}"
    stale.mkdir()
    writer = write_all(tmp_path / "out", planned(2))
    writer = write_all(tmp_path / "out2", planned(2), overwrite=True)
    assert writer.notes == []
    assert only_entry(tmp_path) == [stale.name, "out", "out2"]


def test_names_that_are_patterns(tmp_path: Path) -> None:
    out = tmp_path / "o[u]t*"
    names = (".o[u]t*.partial-7", ".out.partial-7", ".out.partial-7x", ".o[u]t*.partial-x", ".o[u]ts.partial-7")
    for name in names:
        (tmp_path / name).mkdir()
    assert clear_leftovers(out) == ["removed .o[u]t*.partial-7, left by a run that was killed"]
    assert only_entry(tmp_path) == sorted(names[1:])
    assert final_path(tmp_path / names[0]) == out
    assert final_path(out) == out


def test_a_kill_between_the_renames_of_an_overwrite_loses_nothing(tmp_path: Path) -> None:
    out, old = tmp_path / "out", tmp_path / f".out.replaced-{dead_pid()}"
    (old / "tqtool").mkdir(parents=True)
    (old / MANIFEST_NAME).write_bytes(b"old")
    with pytest.raises(UserError, match="out: is not empty"):
        write_all(out, planned(2))
    assert all_files(tmp_path) == {f"out/{MANIFEST_NAME}": b"old"}
    out.rename(old)
    writer = write_all(out, planned(2), overwrite=True)
    assert writer.notes == ["restored out, whose replacement was killed"]
    assert "t0" in raw_tensors(out)
    assert only_entry(tmp_path) == ["out"]


def test_an_old_artifact_whose_replacement_is_there_is_removed(tmp_path: Path) -> None:
    write_all(tmp_path / "out", planned(2))
    old = tmp_path / f".out.replaced-{dead_pid()}"
    old.mkdir()
    assert clear_leftovers(tmp_path / "out") == [f"removed {old.name}, left by a run that was killed"]
    assert only_entry(tmp_path) == ["out"]
