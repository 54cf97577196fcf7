"""Search arguments: which ones a retriever takes, and the partition of the query cache they make."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
from typing import Any

from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import VectorStoreRetriever

from ragcachekit import Partition

NOT_SEARCH_ARGUMENTS = frozenset({"name", "tags", "metadata"})
SCALARS = (str, int, float, bool)
UNSTATED_K = 1
"""Stands in the partition where nobody said ``k``; that nobody did is part of the partition too."""


def search_arguments(retriever: Runnable[Any, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What decides, beside the question, what ``retriever`` finds; read at every call, fields change.

    For a vector store's retriever that is its ``search_kwargs``; for another one its plain fields,
    such as ``k``.
    """
    if isinstance(retriever, VectorStoreRetriever):
        return {**retriever.search_kwargs, **overrides}
    plain = {
        name: value
        for name, value in vars(retriever).items()
        if isinstance(value, SCALARS) and name not in NOT_SEARCH_ARGUMENTS
    }
    return {**plain, **overrides}


def partition(
    namespace: str, retriever: Runnable[Any, Any], arguments: Mapping[str, Any]
) -> Partition | None:
    """The part of the query cache that these arguments may use; None if nothing may be cached.

    Raises
    ------
    ValueError, TypeError
        For a ``k`` that is no positive integer.
    """
    kind = vars(retriever).get("search_type")
    if all(type(value) in SCALARS for value in arguments.values()):
        typed = tuple((name, type(value), value) for name, value in arguments.items())
        return _of_scalars(namespace, kind, typed)
    if any(_has_function(value) for name, value in arguments.items() if name != "k"):
        return None
    return _of(namespace, kind, arguments)


@functools.lru_cache(maxsize=256)  # the usual case, at every call: a dict lookup instead of 20 µs
def _of_scalars(
    namespace: str, kind: str | None, typed: tuple[tuple[str, type, Any], ...]
) -> Partition | None:
    return _of(namespace, kind, {name: value for name, _, value in typed})


def _of(namespace: str, kind: str | None, arguments: Mapping[str, Any]) -> Partition | None:
    k = arguments.get("k")
    plain = Partition.of(namespace, UNSTATED_K if k is None else k)
    rest = {name: value for name, value in arguments.items() if name != "k"}
    try:
        return Partition.of(namespace, plain.k, filters=(kind, k is None), search_kwargs=rest)
    except TypeError:  # an argument that can neither be compared nor taken apart
        return None


def with_arguments(
    retriever: Runnable[Any, Any], overrides: Mapping[str, Any]
) -> tuple[Runnable[Any, Any], dict[str, Any]]:
    """The retriever to ask, and the keyword arguments of its ``invoke``.

    LangChain drops keyword arguments that a retriever does not take without a word. Here ``k`` is set
    as a field of a copy where the retriever has one.

    Raises
    ------
    ValueError
        For arguments that the retriever would drop.
    """
    # LangChain's own record of whether a retriever's search has parameters beside the question.
    if not overrides or not isinstance(retriever, BaseRetriever) or retriever._expects_other_args:
        return retriever, dict(overrides)
    dropped = sorted(overrides.keys() - ({"k"} & type(retriever).model_fields.keys()))
    if dropped:
        raise ValueError(f"{type(retriever).__name__} takes no {', '.join(dropped)}; set it on the retriever")
    return retriever.model_copy(update=dict(overrides)), {}


def _has_function(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_function(item) for item in value.values())
    if isinstance(value, list | tuple | Set):
        return any(_has_function(item) for item in value)
    return callable(value)
