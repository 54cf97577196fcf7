"""The parts that the routes share."""

from __future__ import annotations

from asyncio import Semaphore
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property, partial

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
    turns: defaultdict[str, Semaphore] = field(default_factory=lambda: defaultdict(partial(Semaphore, 2)))
    """By tenant: how many prompts may be tokenised at once."""

    @cached_property
    def context(self) -> int | None:
        """Tokens that the model can read; None if its configuration does not say."""
        found: int | None = getattr(self.rag.model.config.get_text_config(), "max_position_embeddings", None)
        return found

    @cached_property
    def most_characters(self) -> int | None:
        """Characters beyond which no text fits into the context: that of the vocabulary's longest token."""
        longest = max(map(len, self.rag.tokenizer.get_vocab()))
        return None if self.context is None else self.context * longest

    @property
    def model_name(self) -> str:
        """The model that requests name."""
        if self.config.model_name:
            return self.config.model_name
        path = str(getattr(self.rag.model.config, "_name_or_path", "") or "").rstrip("/")
        return path.rpartition("/")[2] or "ragcachekit"
