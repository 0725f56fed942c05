"""The trellis part of ``verify``'s decode check: the kernel that serves against the format's own decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tqtool.artifact import decode_check
from tqtool.artifact.decode_check import decode_problems
from tqtool.artifact.reader import Artifact, read_shards
from tqtool.formats.trellis import TrellisSpec
from tqtool.source.checkpoint import TensorRef

SPECS = [
    TrellisSpec(k=3, rows=40, cols=512, stride=512),  # every row starts on a block
    TrellisSpec(k=3, rows=40, cols=192, stride=192),  # every fourth does
    TrellisSpec(k=2, rows=300, cols=77, stride=77, axis=0),  # every 256th does, and the words are stored flat
    TrellisSpec(k=4, rows=7, cols=300, stride=512, code="1mad", window=16),  # rows padded to whole blocks
    TrellisSpec(k=1, rows=1, cols=1, stride=1),
    TrellisSpec(k=3, rows=70, cols=300, stride=304, tile=16),
]
IDS = [f"{spec.rows}x{spec.cols} stride {spec.stride}" for spec in SPECS]


def artifact_of(folder: Path, spec: TrellisSpec, scales: np.ndarray | None = None) -> Artifact:
    """One module ``m`` of random words. There is no manifest: this check does not look at it."""
    rng = np.random.default_rng(spec.rows)
    words = rng.integers(0, 2**32, spec.words_shape, dtype=np.uint32)
    scales = rng.standard_normal(spec.rows).astype(np.float16) if scales is None else scales
    save_file({"m.weight": words, "m.scales": scales}, folder / "model.safetensors")
    shards = read_shards(folder)
    infos = shards["model.safetensors"].tensors.values()
    path = folder / "model.safetensors"
    tensors = {
        i.name: TensorRef(name=i.name, dtype=i.dtype, shape=i.shape, path=path, begin=i.begin, end=i.end) for i in infos
    }
    config: dict[str, Any] = {"trellis": {"format_version": 2, "modules": {"m": spec.to_config()}}}
    manifest: Any = None
    return Artifact(path=folder, config=config, manifest=manifest, shards=shards, tensors=tensors)


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_kernel_and_format_agree(tmp_path: Path, spec: TrellisSpec) -> None:
    assert decode_problems(artifact_of(tmp_path, spec), {"m": None}) == (1, [])


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_a_kernel_off_by_one_bit_is_red(tmp_path: Path, spec: TrellisSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = decode_check.native.trellis_expand

    def faulty(*arguments: Any) -> np.ndarray:
        out = honest(*arguments)
        out[-1:, -1:].view(np.uint32)[:] ^= 1
        return out

    monkeypatch.setattr(decode_check.native, "trellis_expand", faulty)
    _, problems = decode_problems(artifact_of(tmp_path, spec), {"m": None})
    assert len(problems) == min(3, spec.rows)
    assert "the compiled kernel differs from the format by" in problems[0]


@pytest.mark.parametrize("spec", SPECS[:4], ids=IDS[:4])
def test_words_read_in_another_order_are_red(
    tmp_path: Path, spec: TrellisSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time running forwards: still finite values on closed paths, and still wrong."""
    honest = decode_check.trellis.unpack
    monkeypatch.setattr(decode_check.trellis, "unpack", lambda *parts: honest(*parts)[:, ::-1])
    _, problems = decode_problems(artifact_of(tmp_path, spec), {"m": None})
    assert len(problems) == 3


def test_scales_that_are_not_finite(tmp_path: Path) -> None:
    spec = SPECS[0]
    scales = np.ones(spec.rows, np.float16)
    scales[17] = np.nan  # no sampled row
    _, problems = decode_problems(artifact_of(tmp_path, spec, scales), {"m": None})
    assert problems == ["m.scales: holds values that are not finite"]


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_only_sampled_rows_are_read(tmp_path: Path, spec: TrellisSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per row at most the rows since the last one on a block boundary, rounded up to whole blocks."""
    read: list[int] = []
    honest = TensorRef._read_bytes

    def counting(ref: TensorRef, begin: int, end: int) -> np.ndarray:
        read.append(end - begin if ref.name == "m.weight" else 0)
        return honest(ref, begin, end)

    monkeypatch.setattr(TensorRef, "_read_bytes", counting)
    decode_problems(artifact_of(tmp_path, spec), {"m": None})
    together = 256 // np.gcd(spec.stride, 256)
    limit = (together * spec.stride // 256 + 1) * spec.words_per_block * 4
    assert 0 < max(read) <= limit
    if spec is SPECS[0]:
        assert sum(read) == 3 * 512 * 3 // 8
