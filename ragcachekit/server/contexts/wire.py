"""Contexts in the JSON form of Gemini's API."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from ragcachekit.server.contexts.context import Context
from ragcachekit.server.errors import ApiError

HOUR = 3600.0
LONGEST = 10 * 365 * 24 * HOUR
"""Longest time that a context may be kept, in seconds."""

_Part = TypeVar("_Part")
_Parts = Annotated[list[_Part], Field(fail_fast=True, max_length=4096)]
_TTL = re.compile(r"(\d{1,10}(?:\.\d{1,9})?)s", re.ASCII)


class _Wire(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", strict=True)


class Part(_Wire):
    """A part of a content: text alone."""

    text: str


class Content(_Wire):
    """Parts of one role."""

    role: str | None = None
    parts: _Parts[Part]

    def texts(self) -> list[str]:
        """Texts of the parts; blank ones are left out."""
        return [part.text for part in self.parts if part.text.strip()]


class Lifetime(_Wire):
    """When a context expires: ``ttl`` seconds from now, or a time; by default an hour from now."""

    ttl: str | None = None
    expire_time: str | None = None

    def __call__(self, now: float) -> float:
        """The time when it expires, as Unix time in seconds.

        ApiError 400 for both or an unreadable one, for a time that has passed, and one beyond ten years.
        """
        if self.ttl is not None and self.expire_time is not None:
            raise _invalid("ttl", "give either 'ttl' or 'expireTime'")
        if self.expire_time is not None:
            return _within("expireTime", now, _time(self.expire_time))
        if (found := _TTL.fullmatch(self.ttl or f"{HOUR:g}s")) is None:
            raise _invalid("ttl", "it is a number of seconds with an s, as 300s")
        return _within("ttl", now, now + float(found[1]))


class NewContext(Lifetime):
    """Body of a request that makes a context; each part is a chunk, whatever its content's role."""

    model: str
    contents: _Parts[Content]
    system_instruction: Content | None = None
    display_name: str = Field("", max_length=128)

    def chunks(self) -> list[str]:
        """Texts of all contents, in order."""
        return [text for content in self.contents for text in content.texts()]

    def system(self) -> str | None:
        """The system message's text; None without one."""
        texts = self.system_instruction.texts() if self.system_instruction else []
        return "\n".join(texts) or None


class Change(Lifetime):
    """Body of a request that changes a context: only when it expires can change."""

    name: str | None = None


def described(context: Context) -> dict[str, Any]:
    """A context as a response; its texts are not part of one."""
    return {
        "name": context.name,
        "model": f"models/{context.model}",
        "displayName": context.display_name,
        "createTime": _text(context.created),
        "updateTime": _text(context.updated),
        "expireTime": _text(context.expires),
        "usageMetadata": {"totalTokenCount": context.tokens},
    }


def _text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _time(text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
        if found.tzinfo is not None:
            return found.timestamp()
    except (ValueError, OverflowError):
        pass
    raise _invalid("expireTime", "it is a time in RFC 3339 with a zone, as 2030-01-31T12:00:00Z")


def _within(param: str, now: float, expires: float) -> float:
    if not now < expires <= now + LONGEST:
        raise _invalid(param, "a context expires after now, and within ten years")
    return expires


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, f"Invalid value for '{param}': {message}.", param=param, code="invalid_value")
