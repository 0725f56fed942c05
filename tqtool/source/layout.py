"""Which files of a model folder are weights: the index, the shards it names, and what disagrees."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tqtool.errors import SourceError

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
# mlx-lm loads every file that matches, whatever the index says; so a stray one must never be overlooked.
WEIGHTS_GLOB: Final = "model*.safetensors"
_NUMBERED: Final = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_AGAIN: Final = "download the model folder again, whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The shards of a folder in name order, and ``tensor -> shard file name`` where an index exists."""

    shards: tuple[Path, ...]
    index: dict[str, str] | None


def find_weights(folder: Path) -> WeightFiles:
    """Locate the weight files of ``folder``; no header is read.

    Raises:
        SourceError: no safetensors weights, a shard the index names is missing, a shard on disk is not in the
            index, a numbered shard is missing, or a single file lies beside numbered shards.
    """
    on_disk = sorted(path for path in folder.glob(WEIGHTS_GLOB) if path.is_file() or path.is_symlink())
    index_path = folder / INDEX_NAME
    if index_path.exists():
        index = _read_index(index_path)
        _check_index_files(folder, index, on_disk)
        return WeightFiles(shards=tuple(on_disk), index=index)
    if not on_disk:
        raise _no_weights(folder)
    _check_numbering(folder, on_disk)
    return WeightFiles(shards=tuple(on_disk), index=None)


def _read_index(path: Path) -> dict[str, str]:
    try:
        value: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise SourceError(f"{path}: not a readable JSON file ({error})", hint=_AGAIN) from error
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path}: expected a non-empty object 'weight_map' (tensor name -> file name)", hint=_AGAIN)
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise SourceError(
                f"{path}: tensor {name!r} must map to a .safetensors file of the same folder, found {file!r}"
            )
    return weight_map


def _check_index_files(folder: Path, index: dict[str, str], on_disk: list[Path]) -> None:
    named = set(index.values())
    present = {path.name for path in on_disk}
    missing = sorted(name for name in named if not (folder / name).exists())
    if missing:
        raise SourceError(
            f"{folder}: {INDEX_NAME} names {_listing(missing)}, not on disk "
            f"({len(named) - len(missing)} of {len(named)} shards present)",
            hint="finish the download; every shard is needed",
        )
    stray = sorted(present - named)
    if stray:
        raise SourceError(
            f"{folder}: {_listing(stray)} on disk but not in {INDEX_NAME}; loaders that take every "
            f"{WEIGHTS_GLOB} would merge it into the model",
            hint="delete the stale file, or the stale index, and keep one complete set",
        )
    foreign = sorted(named - present)
    if foreign:
        raise SourceError(
            f"{folder}: {INDEX_NAME} names {_listing(foreign)}, expected names that match {WEIGHTS_GLOB}",
            hint="rename the shards (and the index entries): mlx-lm and others only load that pattern",
        )


def _check_numbering(folder: Path, on_disk: list[Path]) -> None:
    """Without an index only the names tell whether the set is complete."""
    names = [path.name for path in on_disk]
    if len(names) > 1 and SINGLE_NAME in names:
        others = [name for name in names if name != SINGLE_NAME]
        raise SourceError(
            f"{folder}: {SINGLE_NAME} lies beside {_listing(others)}, and no {INDEX_NAME} says which belong together",
            hint="keep one complete set of weights in the folder",
        )
    numbered = [match for match in map(_NUMBERED.fullmatch, names) if match]
    totals = {int(match[2]) for match in numbered}
    if len(totals) > 1:
        raise SourceError(f"{folder}: shards of different sets (of {sorted(totals)}): {_listing(names)}", hint=_AGAIN)
    if totals:
        have = {int(match[1]) for match in numbered}
        missing = sorted(set(range(1, totals.pop() + 1)) - have)
        if missing:
            raise SourceError(
                f"{folder}: shard {missing[0]} of {numbered[0][2].lstrip('0')} is missing"
                + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
                + f", and there is no {INDEX_NAME}",
                hint="finish the download; every shard is needed",
            )


def _no_weights(folder: Path) -> SourceError:
    """Why ``folder`` has no usable weights, as precisely as its content tells."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    if not names:
        return SourceError(f"{folder}: the folder is empty; expected config.json and {WEIGHTS_GLOB}")
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if ggufs:
        return SourceError(
            f"{folder}: only GGUF weights found ({_listing(ggufs)}), expected {WEIGHTS_GLOB}",
            hint=f"tqtool import-gguf {folder / ggufs[0]} OUT, then use OUT",
        )
    if "adapter_model.safetensors" in names or "adapters.safetensors" in names:
        return SourceError(
            f"{folder}: a LoRA adapter, not a model", hint="fuse it into its base model first (mlx_lm fuse)"
        )
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        return SourceError(
            f"{folder}: only PyTorch pickles found ({_listing(pickles)}), expected {WEIGHTS_GLOB}; pickles "
            "can run code and are not read",
            hint="save the model as safetensors (save_pretrained does), or take a revision that has them",
        )
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        return SourceError(
            f"{folder}: found {_listing(others)}, expected names that match {WEIGHTS_GLOB}",
            hint=f"if it is the whole model, rename it to {SINGLE_NAME}",
        )
    return SourceError(f"{folder}: no weights; expected {WEIGHTS_GLOB}, found {_listing(names)}", hint=_AGAIN)


def _listing(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
