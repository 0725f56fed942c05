"""Safetensors files written byte by byte, so that they can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def raw_file(path: Path, header: Any, data: bytes, *, length: int | None = None) -> Path:
    """``header`` is JSON-encoded unless it is bytes already; ``length`` overrides the length field."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
