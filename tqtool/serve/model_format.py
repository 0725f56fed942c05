"""How a model writes: what its chat template and its tokenizer say about reasoning, tool calls and sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tqtool.serve import strict_json
from tqtool.serve.api_error import bad_value, unsupported
from tqtool.serve.schema import Message, TextPart
from tqtool.source.config import text_config


def context_length(config: Mapping[str, Any]) -> int | None:
    """Tokens that the model was made for, or None where its config does not say."""
    value = text_config(config).get("max_position_embeddings") or config.get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else None


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """What ``generation_config.json`` recommends; ``do_sample: false`` recommends greedy."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {
        name: float(value)
        for name in names
        if isinstance(value := generation_config.get(name), int | float) and not isinstance(value, bool)
    }
    return found | ({"temperature": 0.0} if generation_config.get("do_sample") is False else {})


def think_markers(tokenizer: Any) -> tuple[str, str] | None:
    """Begin and end of reasoning: tokens that mlx-lm knows, or ``<think>`` where only the template has it."""
    if tokenizer.has_thinking:
        return str(tokenizer.think_start), str(tokenizer.think_end)
    template = str(getattr(tokenizer, "chat_template", "") or "")
    return ("<think>", "</think>") if "<think>" in template and "</think>" in template else None


def tool_markers(tokenizer: Any) -> tuple[str, str] | None:
    """Begin and end of a tool call in the model's format; None where it is not known."""
    if tokenizer.has_tool_calling:
        return str(tokenizer.tool_call_start), str(tokenizer.tool_call_end)
    template = str(getattr(tokenizer, "chat_template", "") or "")
    return ("<tool_call>", "</tool_call>") if "<tool_call>" in template else None


def parse_tool_call(tokenizer: Any, text: str, tools: list[dict[str, Any]]) -> list[dict[str, str]] | None:
    """``[{"name", "arguments"}]`` with the arguments as JSON text; None where ``text`` is no call."""
    try:
        found = tokenizer.tool_parser(text, tools) if tokenizer.has_tool_calling else json.loads(text)
    except Exception:  # noqa: BLE001 - what a model wrote may break a parser in any way
        return None
    calls = []
    for call in found if isinstance(found, list) else [found]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({"name": call["name"], "arguments": arguments})
    # Models may write half a surrogate pair, too; no answer can carry one.
    return calls if strict_json.lone_surrogate(calls) is None else None


def effort_kwargs(effort: str, template: str) -> dict[str, Any]:
    """What ``reasoning_effort`` means to a template; ApiError where it means nothing."""
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if effort in ("none", "minimal") and "enable_thinking" in template:
        return {"enable_thinking": False}
    raise unsupported("reasoning_effort", f"this model's chat template does not read it, found {effort!r}")


def template_message(message: Message, template: str) -> dict[str, Any]:
    """A message as templates read it: text instead of parts, arguments of calls as objects."""
    content = message.content
    if isinstance(content, list):
        other = next((part for part in content if not isinstance(part, TextPart)), None)
        if other is not None:
            found = "one without text" if other.type == "text" else repr(other.type)
            raise bad_value("messages", f"expected parts of type 'text' with a text, found {found}: text only here")
        content = "".join(part.text for part in content if isinstance(part, TextPart))
    # OpenAI renamed the role; templates know the old name.
    role = "system" if message.role == "developer" and "developer" not in template else message.role
    result: dict[str, Any] = {"role": role, "content": content or ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            result[name] = getattr(message, name)
    if message.tool_calls:
        calls = [call.model_dump(exclude={"index"}, exclude_none=True) for call in message.tool_calls]
        result["tool_calls"] = [_call(call) for call in calls]
    return result


def _call(call: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = strict_json.parse(call["function"]["arguments"] or "{}")
    except ValueError as error:
        raise bad_value("messages", "'tool_calls': arguments are no JSON") from error
    if strict_json.lone_surrogate(arguments) is not None:
        raise bad_value("messages", "'tool_calls': arguments hold a lone surrogate, which is no character of Unicode")
    return call | {"function": call["function"] | {"arguments": arguments}}
