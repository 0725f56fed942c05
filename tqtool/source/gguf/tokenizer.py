"""The tokenizer inside a GGUF file, rebuilt as the files Hugging Face loaders read.

Two models exist in the supported families: byte-level BPE ("gpt2", with a named pre-tokenizer) and SentencePiece BPE
("llama", whose merges are not stored and follow from the pieces' scores). Anything else is refused by name: a wrong
split does not fail, it only makes the model worse.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tqtool.errors import SourceError
from tqtool.source.gguf.reader import GgufFile

_Item = TypeVar("_Item")
BYTE_LEVEL: Final = "gpt2"  # values of `tokenizer.ggml.model`
SENTENCEPIECE: Final = "llama"
SPACE: Final = "▁"  # what SentencePiece writes for a space
# Control tokens that end a turn or a text, by their text; llama.cpp stops at them too.
END_TEXTS: Final = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>"}
)


class TokenKind(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# The word rule of Qwen 2 and Llama 3; they differ in how many digits go together.
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How text is cut before byte-level BPE; ``words`` None means GPT-2's own rule."""

    words: str | None = None
    digits_apart: bool = False
    nfc: bool = False
    whole_words: bool = False
    starts_with_bos: bool = False


# By `tokenizer.ggml.pre`. Sources: the tokenizer.json files published with the models.
SPLITS: Final[Mapping[str, Split]] = {
    "gpt-2": Split(),
    "smollm": Split(digits_apart=True),
    "qwen2": Split(words=_WORDS % "", nfc=True),
    "llama-bpe": Split(words=_WORDS % "{1,3}", whole_words=True, starts_with_bos=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The stored vocabulary, checked: one text, kind and (for SentencePiece) score per id."""

    texts: tuple[str, ...]
    kinds: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[tuple[str, str], ...]

    def ids_of(self, *kinds: TokenKind) -> list[int]:
        """Ids of these kinds, ascending."""
        return [index for index, kind in enumerate(self.kinds) if kind in kinds]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """File name to content, and the ids generation stops at."""

    files: Mapping[str, bytes]
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...]


def build_tokenizer_files(file: GgufFile, *, context_length: int) -> TokenizerFiles:
    """Rebuild tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json and the template.

    Raises:
        SourceError: an unknown tokenizer model or pre-tokenizer, or arrays that do not agree.
    """
    vocabulary = _read_vocabulary(file)
    tokenizer = _BUILDERS[check_tokenizer(file)](file, vocabulary)
    special = _special_tokens(file, vocabulary)
    stops = _stop_ids(file, vocabulary)
    template, notes = _chat_template(file)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        **{name: vocabulary.texts[index] for name, index in special.items()},
    }
    generation = {f"{name}_id": index for name, index in special.items() if name != "unk_token"}
    if stops:
        generation["eos_token_id"] = stops[0] if len(stops) == 1 else list(stops)  # type: ignore[assignment]
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "special_tokens_map.json": _json({name: vocabulary.texts[index] for name, index in special.items()}),
        "generation_config.json": _json(generation),
    }
    if template is not None:
        settings["chat_template"] = template
        files["chat_template.jinja"] = template.encode()
    files["tokenizer_config.json"] = _json(settings)
    return TokenizerFiles(files=files, eos_token_ids=stops, notes=notes)


def check_tokenizer(file: GgufFile) -> str:
    """The tokenizer model of ``file``; SourceError if it or its pre-tokenizer is not one that can be rebuilt."""
    hint = "take the tokenizer from the model's Hugging Face repository"
    kind, pre = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if not isinstance(kind, str) or kind not in _BUILDERS:
        known = ", ".join(_BUILDERS)
        raise SourceError(f"{file.path}: tokenizer model {kind!r} cannot be rebuilt; known: {known}", hint=hint)
    known_pre = list(SPLITS) if kind == BYTE_LEVEL else ["default"]
    if pre not in known_pre and not (kind == SENTENCEPIECE and pre is None):
        raise SourceError(
            f"{file.path}: pre-tokenizer {pre!r} is not known for {kind!r}, text would be cut wrongly; "
            f"known: {', '.join(known_pre)}",
            hint=hint,
        )
    return kind


def _read_vocabulary(file: GgufFile) -> Vocabulary:
    texts = _array(file, "tokens", str)
    if not texts:
        raise SourceError(f"{file.path}: metadata 'tokenizer.ggml.tokens' is missing; the file carries no tokenizer")
    kinds = _array(file, "token_type", int) or [int(TokenKind.NORMAL)] * len(texts)
    scores = _array(file, "scores", float)
    merges = []
    for merge in _array(file, "merges", str):
        # Neither half is empty, so the separating space is never the first or last character.
        cut = merge.find(" ", 1)
        if cut < 1 or cut == len(merge) - 1:
            raise SourceError(f"{file.path}: merge {merge!r} is not two pieces separated by a space")
        merges.append((merge[:cut], merge[cut + 1 :]))
    for name, values in (("token_type", kinds), ("scores", scores)):
        if values and len(values) != len(texts):
            raise SourceError(f"{file.path}: {len(texts):,} tokens but {len(values):,} of tokenizer.ggml.{name}")
    if len(set(texts)) != len(texts):
        twice = next(text for index, text in enumerate(texts) if text in set(texts[:index]))
        raise SourceError(f"{file.path}: token text {twice!r} occurs twice")
    return Vocabulary(texts=tuple(texts), kinds=tuple(kinds), scores=tuple(scores), merges=tuple(merges))


def _array(file: GgufFile, name: str, item: type[_Item]) -> list[_Item]:
    values = file.metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or not all(isinstance(value, item) for value in values):
        raise SourceError(f"{file.path}: tokenizer.ggml.{name} must be an array of {item.__name__}")
    return values


def _byte_level_bpe(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    """GPT-2's scheme: bytes as printable characters, stored merges, and a named rule for cutting words."""
    split = SPLITS[file.metadata["tokenizer.ggml.pre"]]
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix") is True
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocab_of(vocabulary),
            merges=_checked_merges(file, vocabulary),
            fuse_unk=False,
            ignore_merges=split.whole_words,
        )
    )
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits_apart else []
    if split.words is not None:
        steps.append(pre_tokenizers.Split(Regex(split.words), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split.words is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(file, tokenizer, vocabulary)
    _frame(file, tokenizer, vocabulary, bos=split.starts_with_bos)
    return tokenizer


def _sentencepiece_bpe(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece BPE: spaces become a mark, unknown characters fall back to bytes, merges follow from scores."""
    if not vocabulary.scores:
        raise SourceError(f"{file.path}: tokenizer.ggml.scores is missing; the merges cannot be rebuilt")
    vocabulary = _with_marks(vocabulary)
    unknown = vocabulary.ids_of(TokenKind.UNKNOWN) or [file.metadata.get("tokenizer.ggml.unknown_token_id", -1)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocab_of(vocabulary),
            merges=merges_from_scores(vocabulary),
            unk_token=vocabulary.texts[unknown[0]] if 0 <= unknown[0] < len(vocabulary.texts) else None,
            fuse_unk=True,
            byte_fallback=len(vocabulary.ids_of(TokenKind.BYTE)) == 256,
        )
    )
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    rewrite: list[Any] = [normalizers.Replace(" ", SPACE)]
    undo: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        rewrite.insert(0, normalizers.Prepend(SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(rewrite)
    tokenizer.decoder = decoders.Sequence(undo)
    _add_tokens(file, tokenizer, vocabulary)
    _frame(file, tokenizer, vocabulary, bos=True)
    return tokenizer


_BUILDERS: Final[Mapping[str, Callable[[GgufFile, Vocabulary], Tokenizer]]] = {
    BYTE_LEVEL: _byte_level_bpe,
    SENTENCEPIECE: _sentencepiece_bpe,
}


def merges_from_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE model, best score first.

    A piece may be made from any two pieces it can be cut into; the cut with the longer left part comes first, which
    is the published order. User-defined pieces (runs of spaces) count as the best score: they grow before anything
    else, the longest first.
    """
    known = set(vocabulary.texts)
    best = max((vocabulary.scores[index] for index in vocabulary.ids_of(TokenKind.NORMAL)), default=0.0)
    found: list[tuple[float, str, str]] = []
    for index in vocabulary.ids_of(TokenKind.NORMAL, TokenKind.USER_DEFINED):
        text = vocabulary.texts[index]
        score = vocabulary.scores[index] if vocabulary.kinds[index] == TokenKind.NORMAL else best
        cuts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        found += [(score, left, right) for left, right in cuts if left in known and right in known]
    found.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in found]


def _with_marks(vocabulary: Vocabulary) -> Vocabulary:
    """Undo llama.cpp's converter, which writes the spaces of user-defined pieces as spaces."""
    texts = tuple(
        text.replace(" ", SPACE) if kind == TokenKind.USER_DEFINED else text
        for text, kind in zip(vocabulary.texts, vocabulary.kinds, strict=True)
    )
    return replace(vocabulary, texts=texts)


def _vocab_of(vocabulary: Vocabulary) -> dict[str, int]:
    """Text to id, without the unused rows at the end that only pad the embedding matrix."""
    count = len(vocabulary.texts)
    while count and vocabulary.kinds[count - 1] == TokenKind.UNUSED:
        count -= 1
    return {text: index for index, text in enumerate(vocabulary.texts[:count])}


def _checked_merges(file: GgufFile, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    known = set(vocabulary.texts)
    for left, right in vocabulary.merges:
        if not {left, right, left + right} <= known:
            raise SourceError(f"{file.path}: merge {left!r} + {right!r} uses pieces the vocabulary does not have")
    return list(vocabulary.merges)


def _add_tokens(file: GgufFile, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Mark what is never cut: control and unknown tokens as special, user-defined ones as ordinary added tokens."""
    special = vocabulary.ids_of(TokenKind.CONTROL, TokenKind.UNKNOWN)
    user = vocabulary.ids_of(TokenKind.USER_DEFINED)
    # One call each: every call rebuilds the matcher over all of them (Gemma has 6249).
    tokenizer.add_special_tokens([AddedToken(vocabulary.texts[index], normalized=False) for index in special])
    tokenizer.add_tokens([AddedToken(vocabulary.texts[index], normalized=False) for index in user])
    for index in (*special, *user):
        found = tokenizer.token_to_id(vocabulary.texts[index])
        if found != index:
            raise SourceError(f"{file.path}: token {vocabulary.texts[index]!r} has id {index}, rebuilt as {found}")


def _frame(file: GgufFile, tokenizer: Tokenizer, vocabulary: Vocabulary, *, bos: bool) -> None:
    """Put BOS before and EOS after each text, as the file says or the scheme does by default."""
    special = _special_tokens(file, vocabulary)
    begin = special.get("bos_token") if file.metadata.get("tokenizer.ggml.add_bos_token", bos) is True else None
    end = special.get("eos_token") if file.metadata.get("tokenizer.ggml.add_eos_token", False) is True else None
    used = {vocabulary.texts[index]: index for index in (begin, end) if index is not None}
    if not used:
        return
    before = [vocabulary.texts[begin]] if begin is not None else []
    after = [vocabulary.texts[end]] if end is not None else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{text}:1" for text in before), "$B:1", *(f"{text}:1" for text in after)],
        special_tokens=list(used.items()),
    )


def _special_tokens(file: GgufFile, vocabulary: Vocabulary) -> dict[str, int]:
    """``bos_token`` … to id, for those the file names; ids are checked."""
    found = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(vocabulary.texts):
            raise SourceError(
                f"{file.path}: tokenizer.ggml.{key}_token_id is {index}, not one of {len(vocabulary.texts):,} ids"
            )
        found[f"{name}_token"] = index
    return found


def _stop_ids(file: GgufFile, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The end-of-sequence id first, then the file's end-of-turn ids and the control tokens known to end a turn."""
    named = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    by_text = [index for index in vocabulary.ids_of(TokenKind.CONTROL) if vocabulary.texts[index] in END_TEXTS]
    known = [index for index in (*named, *by_text) if isinstance(index, int) and 0 <= index < len(vocabulary.texts)]
    return tuple(dict.fromkeys(known))


def _chat_template(file: GgufFile) -> tuple[str | None, tuple[str, ...]]:
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise SourceError(f"{file.path}: tokenizer.chat_template must be text")
    others = file.metadata.get("tokenizer.chat_templates", [])
    notes = (f"named chat templates left out: {', '.join(map(str, others))}",) if others else ()
    return template, notes


def _json(value: Mapping[str, Any] | Sequence[Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
