"""RagCacheKit: retrieval-augmented generation without paying twice for retrieval and prefill."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ragcachekit.config import LoadConfig, QueueConfig, ShadowConfig, StoreConfig, TreeConfig
from ragcachekit.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    ModelNotSupported,
    QueueFull,
    RagCacheError,
    missing_extra,
)
from ragcachekit.observers import Observer, QueryLookup, RequestStart
from ragcachekit.reports import (
    Answer,
    EncodingStats,
    GenerateReport,
    LinkReport,
    QueueStats,
    ShadowReport,
)
from ragcachekit.types import Chunk, Prompt, Text

if TYPE_CHECKING:
    from ragcachekit.cancellation import CancelScope
    from ragcachekit.engine.asyncio_api import agenerate, astream, to_thread
    from ragcachekit.engine.diagnosis import Diagnosis
    from ragcachekit.engine.rag_cache import RagCache
    from ragcachekit.engine.request import Request
    from ragcachekit.engine.speculation import SpeculativePipeline
    from ragcachekit.engine.view import PromptView
    from ragcachekit.generate.tool_calls import ToolCall, ToolCallReader
    from ragcachekit.json_store import JsonStore
    from ragcachekit.plan.neighbours import CoRetrieved, Neighbours, PrecedingChunks, SimilarChunks
    from ragcachekit.quality.records import TuneReport
    from ragcachekit.retrieval.cached_retrieval import CachedRetrieval, Retrieved
    from ragcachekit.retrieval.calibrate import calibrate
    from ragcachekit.retrieval.document_storage import IndexChange
    from ragcachekit.retrieval.documents import DocumentIndex
    from ragcachekit.retrieval.partition import Partition, bypass_query_cache
    from ragcachekit.retrieval.proximity import ProximityCache
    from ragcachekit.retrieval.saved import SavedEntries

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "CachedRetrieval",
    "CancelScope",
    "Cancelled",
    "Chunk",
    "CoRetrieved",
    "DeadlineExceeded",
    "Diagnosis",
    "DocumentIndex",
    "EncodingStats",
    "EngineError",
    "GenerateReport",
    "IndexChange",
    "JsonStore",
    "LinkReport",
    "LoadConfig",
    "ModelNotSupported",
    "Neighbours",
    "Observer",
    "Partition",
    "PrecedingChunks",
    "Prompt",
    "PromptView",
    "ProximityCache",
    "QueryLookup",
    "QueueConfig",
    "QueueFull",
    "QueueStats",
    "RagCache",
    "RagCacheError",
    "Request",
    "RequestStart",
    "Retrieved",
    "SavedEntries",
    "ShadowConfig",
    "ShadowReport",
    "SimilarChunks",
    "SpeculativePipeline",
    "StoreConfig",
    "Text",
    "ToolCall",
    "ToolCallReader",
    "TreeConfig",
    "TuneReport",
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
    "ragcachekit.plan.neighbours": ("CoRetrieved", "Neighbours", "PrecedingChunks", "SimilarChunks"),
    "ragcachekit.engine.asyncio_api": ("agenerate", "astream", "to_thread"),
    "ragcachekit.quality.records": ("TuneReport",),
    "ragcachekit.engine.diagnosis": ("Diagnosis",),
    "ragcachekit.engine.view": ("PromptView",),
    "ragcachekit.engine.request": ("Request",),
    "ragcachekit.engine.rag_cache": ("RagCache",),
    "ragcachekit.engine.speculation": ("SpeculativePipeline",),
    "ragcachekit.generate.tool_calls": ("ToolCall", "ToolCallReader"),
    "ragcachekit.json_store": ("JsonStore",),
    "ragcachekit.retrieval.cached_retrieval": ("CachedRetrieval", "Retrieved"),
    "ragcachekit.retrieval.calibrate": ("calibrate",),
    "ragcachekit.retrieval.document_storage": ("IndexChange",),
    "ragcachekit.retrieval.documents": ("DocumentIndex",),
    "ragcachekit.retrieval.partition": ("Partition", "bypass_query_cache"),
    "ragcachekit.retrieval.proximity": ("ProximityCache",),
    "ragcachekit.retrieval.saved": ("SavedEntries",),
}


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
