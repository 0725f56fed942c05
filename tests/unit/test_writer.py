"""The artifact writer: layout, order, atomicity, and what a full disk or a dead process leaves."""

from __future__ import annotations

import errno
import hashlib
import json
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
from tqtool.artifact import leftovers as leftovers_module
from tqtool.artifact import writer as writer_module
from tqtool.artifact.leftovers import Hold, clear_leftovers, final_path
from tqtool.artifact.writer import ArtifactWriter, check_target, plan_shards
from tqtool.errors import ArtifactError, UserError
from tqtool.formats.dtypes import DType
from tqtool.formats.manifest import MANIFEST_NAME
from tqtool.solve.quantizer import StoredTensor


def planned(*sizes: int) -> list[StoredTensor]:
    return [StoredTensor(name=f"t{i}", dtype=DType.F32, shape=(size,)) for i, size in enumerate(sizes)]


def arrays(tensors: list[StoredTensor]) -> list[np.ndarray]:
    return [np.arange(tensor.shape[0], dtype=np.float32) + index for index, tensor in enumerate(tensors)]


def write_all(out: Path, tensors: list[StoredTensor], **options: object) -> ArtifactWriter:
    with ArtifactWriter(out, tensors, **options) as writer:
        for tensor, array in zip(tensors, arrays(tensors), strict=True):
            writer.write(tensor.name, array)
        writer.commit()
    return writer


def only_entry(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_shard_is_readable_by_the_reference_library(tmp_path: Path) -> None:
    tensors = planned(3, 1, 7)
    writer = write_all(tmp_path / "out", tensors, total_parameters=11)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    for tensor, array in zip(tensors, arrays(tensors), strict=True):
        np.testing.assert_array_equal(loaded[tensor.name], array)
        assert writer.tensor_sha256[tensor.name] == hashlib.sha256(array.tobytes()).hexdigest()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"] == {"total_size": 44, "total_parameters": 11}
    assert index["weight_map"] == dict.fromkeys(("t0", "t1", "t2"), "model.safetensors")
    header = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert b'"__metadata__":{"format":"mlx"}' in header[:200]
    assert only_entry(tmp_path) == ["out"]


def test_shards_are_cut_and_named_as_mlx_lm_does(tmp_path: Path) -> None:
    tensors = planned(10, 10, 30, 5, 1)  # bytes 40 40 120 20 4
    write_all(tmp_path / "out", tensors, max_shard_bytes=100)
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    shards = {name: sorted(load_file(tmp_path / "out" / name)) for name in names}
    assert list(shards.values()) == [["t0", "t1"], ["t2"], ["t3", "t4"]]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == {tensor: name for name in names for tensor in shards[name]}


def test_the_index_is_sorted_whatever_the_order_in_the_file(tmp_path: Path) -> None:
    tensors = [StoredTensor(name=name, dtype=DType.F32, shape=(1,)) for name in ("b", "c", "a")]
    write_all(tmp_path / "out", tensors)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    assert list(index["weight_map"]) == ["a", "b", "c"]
    header = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert header.index(b'"b"') < header.index(b'"c"') < header.index(b'"a"')


@pytest.mark.parametrize("limit", [1, 39, 40, 41, 80, 81, 1 << 30])
def test_shard_plan_equals_mlx_lms(limit: int) -> None:
    sizes = [10, 10, 30, 5, 1, 1, 20]
    ours = [[tensor.name for tensor in shard.tensors] for shard in plan_shards(planned(*sizes), limit)]
    theirs: list[list[str]] = []  # mlx_lm.utils.make_shards, restated
    total = 0
    for tensor in planned(*sizes):
        if not theirs or total + tensor.nbytes > limit:
            theirs.append([])
            total = 0
        theirs[-1].append(tensor.name)
        total += tensor.nbytes
    assert ours == theirs


def test_file_records_are_true(tmp_path: Path) -> None:
    tensors = planned(4)
    with ArtifactWriter(tmp_path / "out", tensors) as writer:
        writer.write("t0", arrays(tensors)[0])
        writer.add_bytes("tqtool/note.txt", b"hello")
        (tmp_path / "licence").write_bytes(b"terms" * 1000)
        writer.copy_file("LICENSE", tmp_path / "licence")
        writer.commit()
    files = all_files(tmp_path / "out")
    assert set(files) == set(writer.files)
    for name, content in files.items():
        record = writer.files[name]
        assert (record.size_bytes, record.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def write_these(out: Path, tensors: list[StoredTensor], given: list[tuple[str, np.ndarray]]) -> None:
    with ArtifactWriter(out, tensors) as writer:
        for name, array in given:
            writer.write(name, array)
        writer.commit()


ZEROS = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("t1", ZEROS)], r"writer expected t0 F32 \[4\], got t1 F32 \[4\]"),
        ([("t0", np.zeros(5, np.float32))], r"expected t0 F32 \[4\], got t0 F32 \[5\]"),
        ([("t0", np.zeros(4, np.float16))], "got t0 F16"),
        ([("t0", ZEROS), ("t1", ZEROS), ("t2", ZEROS)], "every planned tensor is written"),
        ([("t0", ZEROS)], "1 planned tensors were never written, first t1 of model"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path: Path, given: list[tuple[str, np.ndarray]], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        write_these(tmp_path / "out", planned(4, 4), given)
    assert only_entry(tmp_path) == []


@pytest.mark.parametrize("name", ["../out.txt", "/tmp/out.txt", "model.safetensors"])
def test_files_stay_inside_and_are_written_once(tmp_path: Path, name: str) -> None:
    tensors = planned(4)
    with ArtifactWriter(tmp_path / "out", tensors) as writer:
        writer.write("t0", arrays(tensors)[0])
        with pytest.raises(ArtifactError, match="written twice, or outside"):
            writer.add_bytes(name, b"x")


def write_and_raise(out: Path, error: type[BaseException], **options: object) -> None:
    with ArtifactWriter(out, planned(4, 4), **options) as writer:
        writer.write("t0", ZEROS)
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_any_exception_removes_everything(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        write_and_raise(tmp_path / "out", error)
    assert only_entry(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def full(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(writer_module.os, "fsync", full)
    with pytest.raises(ArtifactError, match=r"model\.safetensors: cannot be written") as caught:
        write_all(tmp_path / "out", planned(4))
    assert caught.value.exit_code == 4
    assert "free space" in (caught.value.hint or "")
    assert only_entry(tmp_path) == []


@pytest.mark.parametrize("sizes", [(1 << 20,), (261_250, 1_250, 50_000)], ids=["in a write", "again when closing"])
def test_file_size_limit_of_the_system(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """A real EFBIG from the kernel, half-way through a shard.

    In the second case bytes are left in the file's buffer, so that closing it fails too: the first error must still
    be the one that is reported, and the folder must still go.
    """
    script = f"""
import resource, signal, sys
from pathlib import Path
import numpy as np
from tests.unit.test_writer import planned, write_all
from tqtool.errors import ArtifactError
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    write_all(Path({str(tmp_path / "out")!r}), planned(*{sizes!r}))
except ArtifactError as error:
    sys.exit(f"{{error.exit_code}} {{error.message}}")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "model.safetensors: cannot be written: File too large" in done.stderr
    assert done.stderr.startswith("4 ")
    assert only_entry(tmp_path) == []


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
from tests.unit.test_writer import planned
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


def dead_pid() -> int:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return int(done.stdout)


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


def test_existing_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_all(tmp_path / "out", planned(2))
    assert set(raw_tensors(tmp_path / "out")) == {"t0"}


def test_a_folder_filled_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ArtifactWriter(out, planned(2)) as writer:
        writer.write("t0", np.zeros(2, np.float32))
        out.mkdir()
        (out / "theirs").write_bytes(b"x")
        with pytest.raises(ArtifactError, match="out: cannot be written"):
            writer.commit()
    assert all_files(tmp_path) == {"out/theirs": b"x"}


def test_targets_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="exists and is not a folder"):
        check_target(tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_bytes(b"")
    with pytest.raises(UserError, match="is not empty"):
        check_target(tmp_path / "full")
    with pytest.raises(UserError, match="not empty and not an artifact of tqtool"):
        check_target(tmp_path / "full", overwrite=True)
    with pytest.raises(UserError, match="no such folder"):
        check_target(tmp_path / "missing" / "out")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    with pytest.raises(UserError, match="not a folder"):
        check_target(tmp_path / "link")


def test_parent_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module.os, "access", lambda path, mode: False)  # tests may run as root
    with pytest.raises(UserError, match="no permission to create out in it"):
        check_target(tmp_path / "out")


def test_overwrite_replaces_an_artifact_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ArtifactWriter(out, planned(2)) as writer:
        writer.write("t0", np.zeros(2, np.float32))
        writer.add_bytes(MANIFEST_NAME, b"{}")
        writer.add_bytes("old.txt", b"")
        writer.commit()
    write_all(out, planned(3), overwrite=True)
    assert "old.txt" not in all_files(out)
    assert raw_tensors(out)["t0"][1] == (3,)
    assert only_entry(tmp_path) == ["out"]


def test_failed_overwrite_keeps_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "tqtool").mkdir()
    (out / MANIFEST_NAME).write_bytes(b"old")
    with pytest.raises(RuntimeError):
        write_and_raise(out, RuntimeError, overwrite=True)
    assert all_files(tmp_path) == {f"out/{MANIFEST_NAME}": b"old"}


def test_empty_tensors_and_scalars(tmp_path: Path) -> None:
    tensors = [
        StoredTensor(name="empty", dtype=DType.F32, shape=(0, 3)),
        StoredTensor(name="scalar", dtype=DType.BF16, shape=()),
    ]
    with ArtifactWriter(tmp_path / "out", tensors) as writer:
        writer.write("empty", np.zeros((0, 3), np.float32))
        writer.write("scalar", np.zeros((), DType.BF16.numpy))
        writer.commit()
    assert raw_tensors(tmp_path / "out") == {"empty": ("F32", (0, 3), b""), "scalar": ("BF16", (), b"\0\0")}
