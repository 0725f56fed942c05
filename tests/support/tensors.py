"""Read safetensors files with ten independent lines: name → (dtype name, shape, bytes)."""

from __future__ import annotations

import json
from pathlib import Path

Raw = tuple[str, tuple[int, ...], bytes]


def raw_tensors(folder: Path) -> dict[str, Raw]:
    """Every tensor of every ``*.safetensors`` directly in ``folder``."""
    found: dict[str, Raw] = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            assert name not in found
            found[name] = (entry["dtype"], tuple(entry["shape"]), data[begin:end])
    return found


def all_files(folder: Path) -> dict[str, bytes]:
    """Relative path → content of everything below ``folder``."""
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
