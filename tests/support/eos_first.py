"""A model that ends every answer before its first word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tests.support.tiny_bpe import write_bpe
from tests.support.tiny_models import Tiny, write_tiny, write_weights

END = 2


def eos_first_tensors(tiny: Tiny) -> dict[str, NDArray[Any]]:
    """Weights whose residual stream is 1 in its first place at every token, which only the end token's row reads."""
    tensors = tiny.tensors()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:] = 0
    tensors["model.embed_tokens.weight"][:, 0] = 1
    tensors["lm_head.weight"][:] = 0
    tensors["lm_head.weight"][END, 0] = 1
    return tensors


def write_eos_first(folder: Path) -> Path:
    """The checkpoint, with the byte-level tokenizer."""
    tiny = Tiny(tied=False, dtype="float32")
    write_tiny(folder, tiny, tokenizer=False)
    write_weights(folder, eos_first_tensors(tiny))
    write_bpe(folder)
    return folder
