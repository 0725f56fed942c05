"""What the server knows about its model, and request bodies turned into engine requests."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tqtool.runtime.load import LoadedModel
from tqtool.serve.answer import CONTENT, REASONING, Format
from tqtool.serve.api_error import ApiError, bad_value, unsupported
from tqtool.serve.jobs import Request
from tqtool.serve.model_format import effort_kwargs, template_message, think_markers, tool_markers
from tqtool.serve.sampling import Sampling
from tqtool.serve.schema import ChatBody, CommonBody, CompletionBody
from tqtool.source.config import text_config

OWN_KWARGS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
)
"""Parameters of the function that renders templates, which are no variables of a template."""
OPENAI_COMPLETION_TOKENS = 16
"""``max_tokens`` of ``/v1/completions`` where none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request may ask for.

    Attributes:
        context: Tokens of prompt and answer together.
        max_tokens: Tokens of an answer; None is what the context leaves.
        body_bytes: Size of a request body.
    """

    context: int
    max_tokens: int | None = None
    body_bytes: int = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model as clients see it.

    Attributes:
        loaded: The model.
        name: Its id.
        aliases: Other names that requests may use.
        limits: Of requests.
        defaults: Sampling where a request says nothing.
        created: Seconds since 1970.
    """

    loaded: LoadedModel
    name: str
    aliases: tuple[str, ...] = ()
    limits: Limits
    defaults: Mapping[str, float] = field(default_factory=dict)
    created: int = 0

    @property
    def vocab(self) -> int:
        """Rows of the embedding: token ids are below."""
        return int(text_config(self.loaded.config)["vocab_size"])

    def check_name(self, asked: str | None) -> None:
        """404 for another model; no name at all means this one."""
        if asked not in (None, self.name, *self.aliases):
            message = f"The model '{asked}' does not exist; this server has '{self.name}'."
            raise ApiError(status=404, message=message, code="model_not_found", param="model")

    def chat(self, body: ChatBody) -> Request:
        """Template, tokens, limits; ApiError for what cannot be done. Slow for long prompts: not for an event loop."""
        self.check_name(body.model)
        _refuse_chat(body)
        tokenizer = self.loaded.tokenizer
        if not tokenizer.has_chat_template:
            message = "This model has no chat template; it continues text: use /v1/completions."
            raise ApiError(status=400, message=message, code="no_chat_template")
        offered = body.tools if body.tools and body.tool_choice != "none" else None
        text = self._render(body, offered)
        tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
        think, tool = think_markers(tokenizer), tool_markers(tokenizer) if offered else None
        opened = think is not None and text.rstrip().endswith(think[0])
        given = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        return Request(
            prompt=tokens,
            max_tokens=self._max_tokens("messages", len(tokens), given, None, least=1),
            sampling=self._sampling(body),
            stops=body.stops,
            format=Format(think=think, tool=tool, initial=REASONING if opened else CONTENT),
            begins_text=True,
            top=(body.top_logprobs or 0) if body.logprobs else None,
            one_tool_call=body.parallel_tool_calls is False,
        )

    def completion(self, body: CompletionBody) -> Request:
        """Tokens and limits; ApiError for what cannot be done."""
        self.check_name(body.model)
        _refuse_common(body)
        if body.best_of not in (None, 1):
            raise unsupported("best_of", "one answer is made")
        if body.suffix:
            raise unsupported("suffix", "text is only continued at its end")
        tokens = self._prompt_tokens(body.prompt)
        echo = bool(body.echo)
        scored = echo and body.logprobs is not None
        return Request(
            prompt=tokens,
            max_tokens=self._max_tokens(
                "prompt", len(tokens), body.max_tokens, OPENAI_COMPLETION_TOKENS, least=0 if echo else 1
            ),
            sampling=self._sampling(body),
            stops=body.stops,
            top=body.logprobs,
            score_prompt=scored or (echo and body.max_tokens == 0),
        )

    def _render(self, body: ChatBody, tools: list[Any] | None) -> str:
        tokenizer = self.loaded.tokenizer
        template = str(getattr(tokenizer, "chat_template", "") or "")
        if tools and "tools" not in template and not tokenizer.has_tool_calling:
            raise unsupported("tools", "this model's chat template has no place for tools")
        extra = dict(body.chat_template_kwargs or {})
        for own in OWN_KWARGS:
            if own in extra:
                raise bad_value("chat_template_kwargs", f"'{own}' is set by the server")
        if body.reasoning_effort is not None:
            extra |= effort_kwargs(body.reasoning_effort, template)
        messages = [template_message(message, template) for message in body.messages]
        offered = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None
        try:
            text = tokenizer.apply_chat_template(
                messages, tools=offered, add_generation_prompt=True, tokenize=False, **extra
            )
        except Exception as error:  # a template is a program, and may raise anything
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise bad_value("messages", f"the model's chat template refuses them: {reason}") from error
        return str(text)

    def _prompt_tokens(self, prompt: str | list[Any]) -> tuple[int, ...]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            tokens = tuple(self.loaded.tokenizer.encode(prompt))
        elif all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            wrong = next((item for item in prompt if not 0 <= item < self.vocab), None)
            if wrong is not None:
                raise bad_value("prompt", f"token {wrong} is outside of the vocabulary, 0 to {self.vocab - 1}")
            tokens = tuple(prompt)
        elif prompt and all(isinstance(item, str | list) for item in prompt):
            raise bad_value("prompt", f"expected one prompt a request, found {len(prompt)}")
        else:
            raise bad_value("prompt", "expected a string or a list of token ids", "invalid_type")
        if not tokens:
            raise bad_value("prompt", "it is empty, and this model's tokenizer has no token to begin with")
        return tokens

    def _max_tokens(self, param: str, prompt: int, asked: int | None, default: int | None, *, least: int) -> int:
        """Tokens of the answer; ``param`` is where the prompt's tokens came from."""
        context, limit = self.limits.context, self.limits.max_tokens
        left = context - prompt
        if left < least or left < 0:
            message = (
                f"This model's maximum context length is {context} tokens. However, your prompt has {prompt} tokens"
                f"{', and nothing is left for an answer' if prompt == context else ''}. Please shorten it."
            )
            raise ApiError(status=400, message=message, code="context_length_exceeded", param=param)
        if asked is None:
            return max(least, min(bound for bound in (left, default, limit) if bound is not None))
        if asked < least:
            raise bad_value("max_tokens", f"expected at least {least}, found {asked}")
        if limit is not None and asked > limit:
            raise bad_value("max_tokens", f"this server allows {limit}, found {asked}")
        if asked > left:
            message = (
                f"This model's maximum context length is {context} tokens. However, you requested {prompt + asked} "
                f"tokens ({prompt} in the prompt, {asked} in the completion). Please reduce one of them."
            )
            raise ApiError(status=400, message=message, code="context_length_exceeded", param="max_tokens")
        return asked

    def _sampling(self, body: CommonBody) -> Sampling:
        def value(name: str, fallback: float) -> float:
            given = getattr(body, name)
            return float(self.defaults.get(name, fallback) if given is None else given)

        bias: dict[int, float] = {}
        for token, amount in (body.logit_bias or {}).items():
            if not (token.isascii() and token.isdigit()) or int(token) >= self.vocab:
                raise bad_value("logit_bias", f"expected token ids below {self.vocab}, found {token!r}")
            bias[int(token)] = amount
        return Sampling(
            temperature=value("temperature", 1.0),
            top_p=value("top_p", 1.0),
            top_k=max(0, int(value("top_k", 0))),
            min_p=value("min_p", 0.0),
            seed=secrets.randbits(32) if body.seed is None else body.seed % (1 << 64),
            repetition_penalty=value("repetition_penalty", 1.0),
            repetition_context=int(body.repetition_context_size or Sampling().repetition_context),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=bias,
        )


def _refuse_common(body: CommonBody) -> None:
    if body.n not in (None, 1):
        raise unsupported("n", f"one answer is made a request, found {body.n}")


def _refuse_chat(body: ChatBody) -> None:
    _refuse_common(body)
    if body.functions is not None or body.function_call is not None:
        name = "functions" if body.functions is not None else "function_call"
        raise unsupported(name, "it is deprecated; use 'tools'")
    if body.response_format is not None and body.response_format.type != "text":
        raise unsupported("response_format", f"only 'text', found {body.response_format.type!r}")
    if body.modalities not in (None, ["text"]) or body.audio is not None:
        raise unsupported("modalities" if body.audio is None else "audio", "this server reads and writes text")
    for name in ("prediction", "web_search_options", "verbosity"):
        if getattr(body, name) is not None:
            raise unsupported(name, "this server has no such thing")
    if isinstance(body.tool_choice, dict) or body.tool_choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", "a call cannot be forced; expected 'auto' or 'none'")
