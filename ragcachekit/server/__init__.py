"""A server with the HTTP interfaces of OpenAI and Anthropic; needs the extra ``serve``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragcachekit.errors import missing_extra
from ragcachekit.server.config import ServerConfig

if TYPE_CHECKING:
    from ragcachekit.server.app import create_app

__all__ = ["ServerConfig", "create_app"]
_EXTRA = ("fastapi", "starlette", "uvicorn", "pydantic", "pydantic_core")


def __getattr__(name: str) -> Any:
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from ragcachekit.server.app import create_app
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        message = f"the server needs FastAPI: {missing_extra('serve', 'fastapi uvicorn')}"
        raise ImportError(message) from error
    return create_app
