"""Bodies of requests, read and refused as OpenAI does."""

from __future__ import annotations

import re
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from ragcachekit.server.errors import ApiError

_Body = TypeVar("_Body", bound=BaseModel)
_FIELD = re.compile(r"[a-z_][A-Za-z_]*")
_TYPES = ("str", "int", "float", "bool")  # tags of a union's members


async def parsed(request: Request, model: type[_Body]) -> _Body:
    """The request's JSON body as a pydantic model.

    ApiError 400 names what is wrong and where. JSON that is nested deeper than 200 levels, or is no UTF-8, is
    such an error, too.
    """
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise _refused(error) from None


def _refused(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # Of a union's errors, that of the member which fits best.
    same = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    first = max(same, key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))
    kind, message, param = first["type"], first["msg"], ""
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif (_FIELD.fullmatch(part) and part not in _TYPES) or not param:
            param += f".{part}" if param else part
    code = "invalid_value"
    if kind == "json_invalid":
        return ApiError(400, f"We could not parse the JSON body of your request: {message}")
    if kind == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}")
    if kind == "missing":
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
