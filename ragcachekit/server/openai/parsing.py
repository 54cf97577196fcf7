"""Bodies of requests, read and refused as OpenAI does."""

from __future__ import annotations

import re
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ragcachekit.server.errors import ApiError

_Body = TypeVar("_Body", bound=BaseModel)
_FIELD = re.compile(r"[a-z_]+")
_TYPES = ("str", "int", "float", "bool")  # tags of a union's members


def parse(kind: type[_Body], raw: bytes) -> _Body:
    """Read a JSON body; ApiError 400 names the first parameter that is wrong."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _refused(error) from None


def _refused(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, message, param = first["type"], first["msg"], ""
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif (_FIELD.fullmatch(part) and part not in _TYPES) or not param:
            param += f".{part}" if param else part
    code: str | None = "invalid_value"
    if kind == "json_invalid":
        return ApiError(400, f"We could not parse the JSON body of your request: {message}")
    if kind == "extra_forbidden":
        code, message = None, f"Unrecognized request argument supplied: {param}"
    elif kind == "missing":
        code, message = "missing_required_parameter", f"Missing required parameter: '{param}'."
    elif kind == "unsupported_parameter":
        code, message = kind, f"Unsupported parameter: '{param}' is not supported with this model."
    elif kind == "unsupported_value":
        code, message = kind, f"Unsupported value: '{param}' does not support this value with this model."
    elif kind.endswith("_type"):
        code, message = "invalid_type", f"Invalid type for '{param}': {message}."
    else:
        message = f"Invalid value for '{param}': {message}."
    return ApiError(400, message, param=param or None, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """A parameter that cannot be followed here."""
    return ApiError(400, message, param=param, code="unsupported_parameter")
