"""The parts that the routes share."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragcachekit import RagCache
from ragcachekit.server.config import ServerConfig
from ragcachekit.server.contexts.store import ContextStore
from ragcachekit.server.limits import Usage


@dataclass(frozen=True)
class Services:
    """The parts of one application."""

    rag: RagCache
    config: ServerConfig
    contexts: ContextStore
    usage: Usage = field(default_factory=Usage)

    @property
    def model_name(self) -> str:
        """The model that requests name."""
        if self.config.model_name:
            return self.config.model_name
        path = str(getattr(self.rag.model.config, "_name_or_path", "") or "").rstrip("/")
        return path.rpartition("/")[2] or "ragcachekit"
