"""What the routes use beside the engine: who asks, what they may use, stored contexts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from ragcachekit import RagCache
from ragcachekit.server.config import ServerConfig
from ragcachekit.server.errors import ApiError
from ragcachekit.server.tenants import Tenant


class Grant(Protocol):
    """A request that was let in."""

    def used(self, tokens: int) -> None:
        """Count what it took instead of what was expected."""


class Usage(Protocol):
    """Limits of the tenants."""

    def admit(self, tenant: Tenant, prompt_tokens: int) -> AbstractAsyncContextManager[Grant]:
        """Let a request in while the block lasts; ApiError 429 beyond a limit."""


class Keys(Protocol):
    """API keys."""

    def authenticate(self, header: str | None) -> Tenant:
        """The tenant of an ``Authorization`` header; ApiError 401."""


class Context(Protocol):
    """A stored prompt beginning."""

    chunks: tuple[str, ...]
    system: str | None

    def texts_of(self, chunk_ids: Sequence[str]) -> Sequence[str]:
        """Texts of some of its chunks; ApiError 404."""


class Contexts(Protocol):
    """Stored contexts of all tenants."""

    def get(self, tenant: Tenant, name: str) -> Context:
        """A tenant's context; ApiError 404."""


class NoContexts:
    """A server without contexts."""

    def get(self, tenant: Tenant, name: str) -> Context:
        """Nothing."""
        raise ApiError(404, f"There is no cached content {name}", param="cached_content", code="not_found")


@dataclass(frozen=True)
class OneTenant:
    """A server without keys: everybody is the same tenant."""

    namespace: str

    def authenticate(self, header: str | None) -> Tenant:
        """That tenant."""
        return Tenant("everybody", self.namespace)


class NoLimits:
    """A server without limits."""

    def used(self, tokens: int) -> None:
        """Not counted."""

    @asynccontextmanager
    async def admit(self, tenant: Tenant, prompt_tokens: int) -> AsyncIterator[Grant]:
        """Everybody."""
        yield self


@dataclass(frozen=True)
class Services:
    """The parts of one application; ``metrics`` gives the text of ``/metrics`` and its content type."""

    rag: RagCache
    config: ServerConfig
    keys: Keys
    usage: Usage
    contexts: Contexts
    metrics: Callable[[], tuple[bytes, str]] | None = None

    @property
    def model_name(self) -> str:
        """The model that requests name."""
        if self.config.model_name:
            return self.config.model_name
        path = str(getattr(self.rag.model.config, "_name_or_path", "") or "").rstrip("/")
        return path.rpartition("/")[2] or "ragcachekit"
