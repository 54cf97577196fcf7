"""What metrics and traces call the model."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragcachekit.engine.rag_cache import RagCache


def model_name(rag: RagCache) -> str:
    """The model's hub id, the last part of a folder it was loaded from, or its class."""
    name = str(getattr(rag.model.config, "name_or_path", "") or "")
    if PurePath(name).is_absolute() or name.startswith("."):
        name = PurePath(name).name
    return name or type(rag.model).__name__
