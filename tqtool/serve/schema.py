"""Request bodies. What OpenAI knows and this server cannot do is refused by name, what nobody knows as unknown.

Names and limits: OpenAI's API reference; ``top_k``, ``min_p``, ``repetition_penalty``, ``repetition_context_size`` and
``chat_template_kwargs`` are named as in mlx-lm's server.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_STOPS = 16
"""OpenAI takes 4; programs written for local models send more."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """``include_obfuscation`` changes nothing here: there is none."""

    include_usage: bool = False
    include_obfuscation: bool = False


Stop = str | Annotated[list[str], Field(max_length=MAX_STOPS)]


class CommonBody(_Strict):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    repetition_context_size: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Without effect on the answer, so they are taken and nothing is said.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @field_validator("stop")
    @classmethod
    def _stops_say_something(cls, stop: Stop | None) -> Stop | None:
        if stop is not None and "" in ([stop] if isinstance(stop, str) else stop):
            raise ValueError("an empty stop string would end every answer before it begins; leave it out")
        return stop

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> CommonBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' is only allowed when 'stream' is true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(CommonBody):
    """``POST /v1/completions``."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class TextPart(_Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class OtherPart(BaseModel):
    """A part that is no text; refused with its name."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str


class FunctionCall(_Strict):
    """What the assistant called."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of the assistant's, sent back as history; streams leave an ``index`` in it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(_Strict):
    """One message. The last six fields are what answers carry and clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | OtherPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role '{self.role}' needs content")
        return self


class Function(_Strict):
    """A function the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool the model may call."""

    type: Literal["function"]
    function: Function


class ResponseFormat(BaseModel):
    """Only text."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str


class ChatBody(CommonBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Known to OpenAI, refused with a word about why.
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    verbosity: str | None = None

    @model_validator(mode="after")
    def _limits_agree(self) -> ChatBody:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("'max_tokens' and 'max_completion_tokens' are the same thing here and differ; give one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("'top_logprobs' is only allowed when 'logprobs' is true")
        return self
