"""Assembling of kernel text: files, includes, installation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tqtool.errors import BackendError
from tqtool.kernels import sources
from tqtool.kernels.kv_kernels import ATTEND_SOURCE, MERGE_SOURCE
from tqtool.kernels.kv_kernels import ENCODE_SOURCE as KV_ENCODE_SOURCE
from tqtool.kernels.metal_kernels import ENCODE_SOURCE, KERNELS, SUM_PARTS_SOURCE
from tqtool.kernels.sources import kernel_text, split

KV_FILES = [ATTEND_SOURCE, MERGE_SOURCE, KV_ENCODE_SOURCE]
FILES = [*(kernel.source for kernel in KERNELS), SUM_PARTS_SOURCE, ENCODE_SOURCE]


@pytest.mark.parametrize("source", FILES)
def test_includes_are_resolved_and_the_rule_is_there_once(source):
    text = kernel_text(source)
    assert '#include "' not in text.header + text.body
    assert text.header.count("TQ_FN uint32_t tq_state(") == (source != SUM_PARTS_SOURCE)
    assert "] = static_cast<" in text.body


@pytest.mark.parametrize("source", KV_FILES)
def test_the_rule_of_packed_kv_is_there_once(source):
    text = kernel_text(source)
    assert '#include "' not in text.header + text.body
    assert text.header.count("TQ_FN TqEight tq_kv_eight(") == 1


def test_the_rule_is_written_down_nowhere_else():
    """A kernel that carried constants of its own could drift from the format."""
    root = sources.source_root()
    for path in sorted((root / "metal").iterdir()):
        text = path.read_text().lower()
        assert not any(number in text for number in ("83dcd12d", "34038481", "76625530", "89226354", "147.", "510"))


def test_every_metal_file_belongs_to_a_kernel():
    root = sources.source_root()
    assert {f"metal/{path.name}" for path in (root / "metal").glob("*.metal")} == {*FILES, *KV_FILES}


def test_pointers_and_references_name_their_memory():
    """Metal refuses a parameter that does not say where it points; g++, which runs the text in tests, does not mind."""
    declarator = re.compile(r"(?P<before>[^;{}()\n,]*)(?:\w \*\w|\(&\w+\)|\w &\w)")
    found = 0
    for path in sorted((sources.source_root() / "metal").iterdir()):
        code = re.sub(r"//.*", "", path.read_text())
        for match in declarator.finditer(code):
            found += 1
            assert re.search(r"\b(device|constant|threadgroup|thread)\b", match.group()), (
                f"{path.name}: {match.group()}"
            )
    assert found >= 4


def test_text_is_split_after_its_last_include():
    twice = '#include "common/constants.h"  // and a remark\n#include "common/constants.h"\n'
    text = split(f"// what\n#include <metal_simdgroup_matrix>\n{twice}body;\n")
    assert text.header.startswith("// what\n#include <metal_simdgroup_matrix>\n// GENERATED")
    assert text.header.count("#define TQ_BYTE_SUM_MEAN") == 1
    assert text.body == "\nbody;\n"
    assert split("y[0] = 1;") == sources.KernelText("", "y[0] = 1;")


def test_a_missing_file_is_named():
    with pytest.raises(BackendError, match=r"kernel source .*nothing\.metal"):
        kernel_text("metal/nothing.metal")


def test_an_installation_without_sources_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "site" / "tqtool" / "kernels" / "sources.py"))
    with pytest.raises(BackendError, match="no kernel sources"):
        sources.source_root.__wrapped__()
    installed = tmp_path / "site" / "tqtool" / "kernels" / "source" / "common"
    installed.mkdir(parents=True)
    (installed / "trellis_decode.h").write_text("")
    assert sources.source_root.__wrapped__() == installed.parent


def test_the_build_installs_the_folders_that_are_read():
    rules = (Path(__file__).parents[2] / "CMakeLists.txt").read_text()
    root = sources.source_root()
    read = sorted({f"kernels/{path.parent.name}" for path in root.glob("*/*") if path.parent.name != "cpu"})
    assert read == ["kernels/common", "kernels/cuda", "kernels/metal"]
    (rule,) = re.findall(
        r"install\(DIRECTORY ([\w/ ]+) DESTINATION tqtool/kernels/source\s+FILES_MATCHING ([^)]*)\)", rules
    )
    assert sorted(rule[0].split()) == read
    endings = {path.suffix for folder in ("common", "cuda", "metal") for path in (root / folder).iterdir()}
    assert set(re.findall(r'PATTERN "\*(\.\w+)"', rule[1])) == endings


def test_the_wheel_leaves_no_package_out():
    """An exclusion of ``kernels/**`` is matched below every package: it took tqtool/kernels along."""
    import tomllib

    build = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert not any(
        "kernels" in pattern for pattern in build.get("wheel.exclude", build.get("wheel", {}).get("exclude", []))
    )
