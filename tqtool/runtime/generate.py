"""Text from a loaded model, through mlx-lm's own generation loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tqtool.errors import UserError
from tqtool.kv.scheme import FULL_CACHE, KVOptions
from tqtool.runtime.load import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What to generate.

    Attributes:
        prompt: User message, or with ``raw`` the text to continue.
        system: System message; only with the chat template.
        raw: Feed the prompt as it is, without chat template.
        max_tokens: Upper limit of new tokens.
        temperature: 0 is greedy.
        top_p: Nucleus; 0 or 1 is off.
        seed: Of the sampler.
        kv: The KV cache.
    """

    prompt: str
    system: str | None = None
    raw: bool = False
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 0.0
    seed: int = 0
    kv: KVOptions = FULL_CACHE

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"--max-tokens {self.max_tokens}: expected at least 1")
        if self.temperature < 0 or not 0 <= self.top_p <= 1:
            raise UserError(f"--temp {self.temperature} --top-p {self.top_p}: expected temp ≥ 0, 0 ≤ top-p ≤ 1")
        if self.raw and self.system is not None:
            raise UserError("--system needs the chat template", hint="drop --raw, or put the text into --prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of text as it comes; the last one has a ``finish_reason``, ``stop`` or ``length``.

    Rates are tokens per second, counts include everything up to this piece.
    """

    text: str
    prompt_tokens: int
    prompt_tokens_per_s: float
    new_tokens: int
    new_tokens_per_s: float
    peak_memory_gb: float
    finish_reason: str | None


def generate(loaded: LoadedModel, request: GenerateRequest) -> Iterator[Piece]:
    """Stream the answer of ``loaded``.

    Raises:
        UserError: the model has no chat template and ``request.raw`` is False; the prompt is empty; the model cannot
            have such a KV cache.
    """
    import mlx.core as mx
    from mlx_lm.generate import stream_generate
    from mlx_lm.sample_utils import make_sampler

    from tqtool.kv.cache import make_caches

    prompt = encode_prompt(loaded, request)
    mx.random.seed(request.seed)
    sampler = make_sampler(temp=request.temperature, top_p=request.top_p)
    caches = make_caches(loaded.model, request.kv.scheme, start=request.kv.start)
    stream = stream_generate(
        loaded.model,
        loaded.tokenizer,
        prompt,
        max_tokens=request.max_tokens,
        sampler=sampler,
        prompt_cache=caches,
    )
    for response in stream:
        yield Piece(
            text=response.text,
            prompt_tokens=response.prompt_tokens,
            prompt_tokens_per_s=response.prompt_tps,
            new_tokens=response.generation_tokens,
            new_tokens_per_s=response.generation_tps,
            peak_memory_gb=response.peak_memory,
            finish_reason=response.finish_reason,
        )


def kv_bytes_per_token(loaded: LoadedModel, kv: KVOptions) -> int:
    """Bytes that one more token takes in the KV caches of ``loaded``; UserError if it cannot have such."""
    from tqtool.kv.cache import cache_bytes_per_token

    return cache_bytes_per_token(loaded.model, kv.scheme)


def encode_prompt(loaded: LoadedModel, request: GenerateRequest) -> list[int]:
    """Token ids of the prompt, templated unless ``request.raw``."""
    tokenizer = loaded.tokenizer
    if request.raw:
        ids = list(tokenizer.encode(request.prompt))
    else:
        if not tokenizer.has_chat_template:
            raise UserError(
                f"{loaded.report.path}: the tokenizer has no chat template",
                hint="a base model continues text: use --raw",
            )
        messages = [{"role": "user", "content": request.prompt}]
        if request.system is not None:
            messages.insert(0, {"role": "system", "content": request.system})
        ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True))
    if not ids:
        raise UserError("the prompt is empty")
    return ids
