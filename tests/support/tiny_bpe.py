"""A byte-level BPE tokenizer small enough to reason about, for models of ``tiny_models``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.tiny_models import CHAT_TEMPLATE

MERGES = (("t", "a"), ("c", "a"), ("ca", "t"), ("Ġ", "b"), ("Ġ", "d"), ("o", "g"), ("Ġd", "og"), ("Ġ", "Ġ"))
"""By rank: "cat" is one token, "catalog" has "ta" first and so no "cat"; " b" and " dog" are tokens."""


def write_bpe(folder: Path, *, template: str | None = CHAT_TEMPLATE, bos: bool = False) -> None:
    """Write tokenizer files: ids 0–2 special (``<unk>``, ``<s>``, ``</s>``), then 256 bytes, then ``MERGES``.

    ``bos``: texts begin with ``<s>``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
