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
    from ragcachekit.query.adaptive import AdaptiveTolerance
    from ragcachekit.query.base import Partition
    from ragcachekit.query.calibrate import calibrate
    from ragcachekit.query.lookups import Lookup, Retrieved
    from ragcachekit.query.partition.objects import Identity
    from ragcachekit.query.partition.partitioner import Partitioner, bypass_query_cache
    from ragcachekit.query.partition.rules import KeyRules
    from ragcachekit.query.proximity import ProximityCache
    from ragcachekit.query.retrieval import CachedRetrieval
    from ragcachekit.query.retrievers.candidates import OwnSearch
    from ragcachekit.query.retrievers.embedding_cache import EmbeddingCache
    from ragcachekit.query.retrievers.noted_order import NotedOrder
    from ragcachekit.query.retrievers.retriever_cache import RetrieverCache, RetrieverSettings, name_of
    from ragcachekit.query.saved import SavedEntries
    from ragcachekit.search.documents.index import DocumentIndex
    from ragcachekit.search.documents.record import IndexChange

__version__ = "0.1.0"
__all__ = [
    "AdaptiveTolerance",
    "Answer",
    "CachedRetrieval",
    "CancelScope",
    "Cancelled",
    "Chunk",
    "CoRetrieved",
    "DeadlineExceeded",
    "Diagnosis",
    "DocumentIndex",
    "EmbeddingCache",
    "EncodingStats",
    "EngineError",
    "GenerateReport",
    "Identity",
    "IndexChange",
    "JsonStore",
    "KeyRules",
    "LinkReport",
    "LoadConfig",
    "Lookup",
    "ModelNotSupported",
    "Neighbours",
    "NotedOrder",
    "Observer",
    "OwnSearch",
    "Partition",
    "Partitioner",
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
    "RetrieverCache",
    "RetrieverSettings",
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
    "name_of",
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
    "ragcachekit.query.adaptive": ("AdaptiveTolerance",),
    "ragcachekit.query.base": ("Partition",),
    "ragcachekit.query.calibrate": ("calibrate",),
    "ragcachekit.query.retrievers.noted_order": ("NotedOrder",),
    "ragcachekit.query.retrievers.candidates": ("OwnSearch",),
    "ragcachekit.query.partition.rules": ("KeyRules",),
    "ragcachekit.query.partition.objects": ("Identity",),
    "ragcachekit.query.partition.partitioner": ("Partitioner", "bypass_query_cache"),
    "ragcachekit.query.proximity": ("ProximityCache",),
    "ragcachekit.query.retrievers.embedding_cache": ("EmbeddingCache",),
    "ragcachekit.query.lookups": ("Lookup", "Retrieved"),
    "ragcachekit.query.retrieval": ("CachedRetrieval",),
    "ragcachekit.query.retrievers.retriever_cache": ("RetrieverCache", "RetrieverSettings", "name_of"),
    "ragcachekit.query.saved": ("SavedEntries",),
    "ragcachekit.search.documents.index": ("DocumentIndex",),
    "ragcachekit.search.documents.record": ("IndexChange",),
}


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
