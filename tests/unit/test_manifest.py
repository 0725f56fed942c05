"""The manifest: canonical bytes, and every way to be wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from tqtool.errors import ArtifactError
from tqtool.formats.manifest import (
    FileRecord,
    Manifest,
    PartRecord,
    SourceRecord,
    StoredRecord,
    TensorRecord,
    Totals,
    TransformRecord,
    encode,
    parse,
)

HASH = "ab" * 32


def example() -> Manifest:
    stored = StoredRecord(
        name="a.weight", dtype="U32", shape=[2, 8], file="model.safetensors", size_bytes=64, sha256=HASH
    )
    return Manifest(
        kind="affine",
        source=SourceRecord(kind="hub", location="org/name", revision="0123", content_sha256=HASH, sample_sha256=HASH),
        transforms=[TransformRecord(id="rotation.llama", seed=42, deviations=["no-r4"])],
        request={"verb": "convert", "rules": ["*=bits:8"], "packing": {"bits": 4}},
        tools={"tqtool": "0.1.0"},
        tensors=[
            TensorRecord(
                name="a.weight",
                module="a",
                role="q",
                source="a.weight",
                source_sha256=HASH,
                key=None,
                folds=["· R"],
                quantizer="affine4 g64",
                shape=[2, 64],
                parameters=128,
                stored=[stored],
                notes=[],
                stats={"relative_error": 0.1 + 0.2},
                parts=[],
            )
        ],
        totals=Totals(
            parameters=128,
            source_parameters=128,
            tensor_bytes=64,
            bits_per_weight=4.0,
            bits_per_source_weight=4.0,
            code_bits_per_weight=4.0,
        ),
        files={"model.safetensors": FileRecord(size_bytes=200, sha256=HASH)},
        notes=["é"],
    )


def edited(**changes: Any) -> bytes:
    body = json.loads(encode(example()))
    body.update(changes)
    return json.dumps(body).encode()


def test_round_trip_is_exact() -> None:
    data = encode(example())
    assert parse(data) == example()
    assert encode(parse(data)) == data


def test_bytes_are_canonical() -> None:
    body = json.loads(encode(example()))
    assert list(body) == sorted(body)
    assert encode(example()).endswith(b"}\n")
    assert "é" in encode(example()).decode()


def test_every_flipped_byte_is_found() -> None:
    data = encode(example())
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(ArtifactError):
            parse(bytes(damaged))


@pytest.mark.parametrize("cut", [0, 1, 100, -1, -2])
def test_truncated(cut: int) -> None:
    with pytest.raises(ArtifactError):
        parse(encode(example())[:cut])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[]", "holds list, expected an object"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"{}", "format_version None, this tqtool reads 1"),
        (edited(format_version=2), "format_version 2, this tqtool reads 1"),
        (edited(extra=1), "extra: Extra inputs are not permitted"),
        (edited(kind=3), "kind: Input should be a valid string"),
        (edited(files={}), "tensor a.weight lies in model.safetensors, which files does not list"),
        (edited(files={"../x": {"size_bytes": 1, "sha256": HASH}}), r"file name '\.\./x' is not allowed"),
        (edited(files={"x": {"size_bytes": -1, "sha256": HASH}}), "greater than or equal to 0"),
        (edited(files={"x": {"size_bytes": 1, "sha256": "00"}}), "should match pattern"),
        (edited(notes=["other"]), "digest does not match"),
        (edited(digest="0" * 64), "digest does not match"),
        (json.dumps(json.loads(encode(example()))).encode(), "digest does not match"),
    ],
)
def test_refusals(data: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        parse(data, "m.json")


def stack(**changes: Any) -> TensorRecord:
    part = PartRecord(
        name="e.0.weight",
        source="all",
        rows=[0, 2],
        source_sha256=HASH,
        key=HASH,
        folds=["· R"],
        quantizer="affine4 g64",
        notes=["no token was sent to it"],
        stats={},
    )
    parts = [part, part.model_copy(update={"name": "e.1.weight", "source": "other", "rows": None})]
    plain = example().tensors[0].model_dump()
    return TensorRecord.model_validate(plain | {"source": None, "source_sha256": None, "parts": parts} | changes)


def test_a_stack_has_parts_in_place_of_a_source() -> None:
    record = stack(notes=["kept dense"])
    manifest = example().model_copy(update={"tensors": [record]})
    assert parse(encode(manifest)) == manifest
    assert record.sources() == {"all": HASH, "other": HASH}
    assert record.all_notes() == ["kept dense", "no token was sent to it", "no token was sent to it"]
    assert example().tensors[0].sources() == {"a.weight": HASH}


@pytest.mark.parametrize(
    "changes",
    [{"source": "a"}, {"parts": []}, {"source": "a", "source_sha256": HASH}, {"source_sha256": HASH}],
)
def test_a_tensor_has_one_source_or_parts(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="either a source with its hash, or parts"):
        stack(**changes)


def test_stored_by_name() -> None:
    assert list(example().stored()) == ["a.weight"]
