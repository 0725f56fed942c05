"""Refusals and failures in the shape of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails


@dataclass(kw_only=True, eq=False)
class ApiError(Exception):
    """One error answer.

    Attributes:
        status: Of HTTP.
        message: What, where, expected, found.
        code: OpenAI's short name of the case, or None.
        param: The parameter at fault, or None.
        type: OpenAI's class of errors.
        headers: Extra ones of the answer.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    type: str = "invalid_request_error"
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """``{"error": {"message", "type", "param", "code"}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_value(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """400 for one parameter."""
    return ApiError(status=400, message=f"Invalid '{param}': {message}", code=code, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """400 for a parameter that OpenAI knows and this server does not."""
    return ApiError(
        status=400, message=f"Unsupported parameter: '{param}': {message}", code="unsupported_parameter", param=param
    )


def not_unicode(param: str) -> ApiError:
    """400 for a lone surrogate in the string at ``param``; empty where a name at the top of the body has it."""
    detail = "a lone surrogate (\\ud800 to \\udfff outside of a pair) is no character of Unicode"
    message = f"Invalid '{param}': {detail}" if param else f"Invalid name of a parameter: {detail}"
    return ApiError(status=400, message=message, code="invalid_value", param=param or None)


def unavailable(message: str, retry_after: int) -> ApiError:
    """503 with ``Retry-After``; OpenAI's client waits so long and tries again."""
    headers = {"retry-after": str(retry_after)}
    return ApiError(status=503, message=message, type="server_error", code="unavailable", headers=headers)


def broken(message: str) -> ApiError:
    """500."""
    return ApiError(status=500, message=message, type="server_error", code="internal_error")


def from_validation(error: ValidationError) -> ApiError:
    """The first fault of a request body in OpenAI's words."""
    faults = error.errors(include_url=False, include_context=False)
    fault, param = faults[0], _param(faults[0])
    if param and _is_variant(fault["loc"][-1]):
        # Of a union pydantic tells what each member finds. One that found no wrong type here has the right one.
        other = next((one for one in faults if _is_inside(one, param)), fault)
        fault, param = other, _param(other)
    kind = fault["type"]
    if kind == "extra_forbidden":
        return ApiError(status=400, message=f"Unknown parameter: '{param}'.", code="unknown_parameter", param=param)
    if kind == "missing":
        message = f"Missing required parameter: '{param}'."
        return ApiError(status=400, message=message, code="missing_required_parameter", param=param)
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    detail = fault["msg"].removeprefix("Value error, ")
    if code == "invalid_type":
        # dict.fromkeys: each once, in order.
        types = dict.fromkeys(_TYPES.get(one["type"], one["type"]) for one in faults if _param(one) == param)
        detail = f"expected {' or '.join(types)}"
    where = f"Invalid '{param}': " if param else ""
    return ApiError(status=400, message=f"{where}{detail}", code=code, param=param or None)


def _param(fault: ErrorDetails) -> str:
    return ".".join(str(part) for part in fault["loc"] if not _is_variant(part))


def _is_inside(fault: ErrorDetails, param: str) -> bool:
    found = _param(fault)
    return found.startswith(f"{param}.") or (found == param and not fault["type"].endswith("_type"))


def _is_variant(part: str | int) -> bool:
    """Pydantic names the member of a union that it tried, which is no part of the request."""
    return isinstance(part, str) and (part in _VARIANTS or "[" in part)


_VARIANTS = frozenset({"str", "int", "float", "bool", "dict", "TextPart", "OtherPart"})
_TYPES = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "an array",
    "model_type": "an object",
    "string_type": "a string",
}
"""Pydantic's names of faults, as JSON calls what was expected."""
