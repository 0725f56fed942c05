"""The artifact writer: layout, order, what is refused, what an error or a full disk leaves."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.tensors import all_files, raw_tensors
from tests.support.written import arrays, only_entry, planned, write_all
from tqtool.artifact import writer as writer_module
from tqtool.artifact.writer import ArtifactWriter, check_target, plan_shards
from tqtool.errors import ArtifactError, UserError
from tqtool.formats.dtypes import DType
from tqtool.formats.manifest import MANIFEST_NAME
from tqtool.solve.quantizer import StoredTensor


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
from tests.support.written import planned, write_all
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
