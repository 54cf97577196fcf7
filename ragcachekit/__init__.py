"""RagCacheKit: retrieval-augmented generation without paying twice for retrieval and prefill."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ragcachekit.config import LoadConfig, QueueConfig, ShadowConfig, StoreConfig, TreeConfig
from ragcachekit.errors import (
    Cancelled,
    DeadlineExceeded,
    ModelNotSupported,
    QueueFull,
    RagCacheError,
    missing_extra,
)
from ragcachekit.observers import Observer
from ragcachekit.reports import Answer
from ragcachekit.types import Chunk, Prompt, Text

if TYPE_CHECKING:
    from ragcachekit.cancellation import CancelScope
    from ragcachekit.engine.rag_cache import RagCache
    from ragcachekit.engine.request import Request, agenerate, astream, to_thread
    from ragcachekit.engine.speculation import Speculation, SpeculativePipeline
    from ragcachekit.generate.tool_calls import ToolCallReader
    from ragcachekit.plan.companions import Neighbours, PrecedingChunks, SimilarChunks
    from ragcachekit.retrieval.cached_retrieval import CachedRetrieval
    from ragcachekit.retrieval.distances import calibrate
    from ragcachekit.retrieval.documents import DocumentIndex
    from ragcachekit.retrieval.partition import bypass_query_cache
    from ragcachekit.retrieval.proximity import ProximityCache

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "CachedRetrieval",
    "CancelScope",
    "Cancelled",
    "Chunk",
    "DeadlineExceeded",
    "DocumentIndex",
    "LoadConfig",
    "ModelNotSupported",
    "Neighbours",
    "Observer",
    "PrecedingChunks",
    "Prompt",
    "ProximityCache",
    "QueueConfig",
    "QueueFull",
    "RagCache",
    "RagCacheError",
    "Request",
    "ShadowConfig",
    "SimilarChunks",
    "Speculation",
    "SpeculativePipeline",
    "StoreConfig",
    "Text",
    "ToolCallReader",
    "TreeConfig",
    "agenerate",
    "astream",
    "bypass_query_cache",
    "calibrate",
    "missing_extra",
    "to_thread",
]

# What needs torch or numpy is imported at first use, so that importing the package stays light.
_LAZY = {
    "ragcachekit.cancellation": ("CancelScope",),
    "ragcachekit.plan.companions": ("Neighbours", "PrecedingChunks", "SimilarChunks"),
    "ragcachekit.engine.request": ("Request", "agenerate", "astream", "to_thread"),
    "ragcachekit.engine.rag_cache": ("RagCache",),
    "ragcachekit.engine.speculation": ("Speculation", "SpeculativePipeline"),
    "ragcachekit.generate.tool_calls": ("ToolCallReader",),
    "ragcachekit.retrieval.cached_retrieval": ("CachedRetrieval",),
    "ragcachekit.retrieval.distances": ("calibrate",),
    "ragcachekit.retrieval.documents": ("DocumentIndex",),
    "ragcachekit.retrieval.partition": ("bypass_query_cache",),
    "ragcachekit.retrieval.proximity": ("ProximityCache",),
}


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
