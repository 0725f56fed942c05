"""A model that says what a script tells it, in a real checkpoint: the next token depends on the last one alone.

Attention and MLP write nothing, the embedding is the identity, and the head is a table of logits: row, the token
before; column, the next. Text of a prompt is bytes; what the model says is tokens of its own, cut as the tests want,
also in the middle of a character or a marker. The last byte of a prompt decides what is said; text that no script
knows continues with the letters of English.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.support.tiny_models import Tiny, write_tiny, write_weights
from tqtool.serve.token_text import byte_alphabet

ENGLISH = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair. The quick brown fox jumps over the lazy dog. "
    "The capital of France is Paris, and the sum of two and three is five. 😀 🎉 😀 🎉"
)
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for tool_call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ tool_call.name }}{{ tool_call.function.name }}"}</tool_call>'
    "{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if mode is defined %}{{ mode }}{% elif tools %}\x01{% endif %}"
    "{% endif %}"
)
HELLO, TOOL, TWO_TOOLS, NO_TOOL, THINK, OPENED, EMPTY, BROKEN, LOOP, DICE = ">\x01\x02\x03\x04\x05\x06\x07\x0e\x0f"
SCRIPTS: dict[str, list[bytes]] = {
    HELLO: [b"Hello", b", w\xc3", b"\xb6rld \xf0", b"\x9f\x98", b"\x80 and", b" ST", b"OP more", b" text."],
    TOOL: [
        b"I look.", b"<tool_", b"call>", b'{"name": "get_weather", "argu', 'ments": {"city": "Zürich"}}'.encode(),
        b"</tool_call>",
    ],
    TWO_TOOLS: [
        b"<tool", b'_call>{"name": "one", "arguments": {}}</too', b"l_call>\n<tool_c", b"all>",
        b'{"name": "two", "arguments": {"a": 1}}</tool_ca', b"ll>",
    ],
    NO_TOOL: [b"<to", b"ol_call>no JSON", b"</tool_", b"call> after"],
    THINK: [b"<thi", b"nk>\nLet me", b" think. ", b"</t", b"hink>\n\n", b"42"],
    OPENED: [b"already", b" thinking</", b"think>", b"done"],
    EMPTY: [],
    BROKEN: [b"bad ", b"\xff\xff byte ", b"\xf0\x9f\x98"],  # no UTF-8, and a character that never ends
}  # fmt: skip
LOOPED = [b"one ", b"two ", b"three "]
DICE_SIDES = [b"%d;" % side for side in range(10)]
END = 2
FIRST_BYTE = 3
SURE, NEVER = 0.0, -16.0
"""Logits; apart by so much that 3-bit rounding does not change what is said."""


def _tokens() -> list[bytes]:
    spoken = [token for script in SCRIPTS.values() for token in script]
    tokens = [*(bytes([value]) for value in range(256)), *spoken, *LOOPED, *DICE_SIDES]
    assert len(set(tokens)) == len(tokens), "a token in two scripts would mix them up"
    return tokens


TOKENS = _tokens()
WIDTH = 384


def token_id(token: bytes) -> int:
    """Id of a token."""
    return FIRST_BYTE + TOKENS.index(token)


def table() -> NDArray[np.float32]:
    """Logits [token before, next token]."""
    logits = np.full((WIDTH, WIDTH), NEVER, np.float32)
    text = ENGLISH.encode()
    counts = np.full((256, 256), 0.02)
    for before, after in pairwise(text):
        counts[before, after] += 1
    logits[FIRST_BYTE : FIRST_BYTE + 256, FIRST_BYTE : FIRST_BYTE + 256] = np.maximum(
        np.log(counts / counts.sum(1, keepdims=True)), NEVER
    )
    for start, script in SCRIPTS.items():
        path = [token_id(start.encode()), *map(token_id, script), END]
        for before, after in pairwise(path):
            logits[before] = NEVER
            logits[before, after] = SURE
    _jump(logits, LOOP, LOOPED[:1])
    for before, after in pairwise([*LOOPED, LOOPED[0]]):
        logits[token_id(before)] = NEVER
        logits[token_id(before), token_id(after)] = SURE
    _jump(logits, DICE, DICE_SIDES)
    for side in DICE_SIDES:
        logits[token_id(side), [token_id(other) for other in DICE_SIDES]] = SURE
    return logits


def _jump(logits: NDArray[np.float32], start: str, targets: list[bytes]) -> None:
    logits[token_id(start.encode())] = NEVER
    logits[token_id(start.encode()), [token_id(target) for target in targets]] = SURE


def write_scripted(folder: Path, *, context: int = 1024, template: str | None = TEMPLATE) -> Path:
    """The checkpoint with its tokenizer, float32."""
    tiny = Tiny(
        hidden=WIDTH, intermediate=64, heads=2, kv_heads=1, head_dim=64, layers=1, vocab=WIDTH, tied=False,
        dtype="float32",
    )  # fmt: skip
    write_tiny(folder, tiny, tokenizer=False)
    tensors = tiny.tensors()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:] = 0
        if name.endswith("norm.weight"):
            tensor[:] = 1
    tensors["model.embed_tokens.weight"] = np.eye(WIDTH, dtype=np.float32)
    # A row of the identity leaves the norm as a one times the root of the width.
    tensors["lm_head.weight"] = np.ascontiguousarray(table().T / np.sqrt(WIDTH)).astype(np.float32)
    write_weights(folder, tensors)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    write_scripted_tokenizer(folder, template)
    return folder


def write_scripted_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Bytes and the scripts' tokens; ``<think>`` and its end are tokens of their own, which nothing says."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {byte: character for character, byte in byte_alphabet().items()}
    words = ["<unk>", "<s>", "</s>", *("".join(letters[byte] for byte in token) for token in TOKENS)]
    words += ["<think>", "</think>"]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
