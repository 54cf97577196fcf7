"""Documents as an index holds them, what a change of the index consists of, and checks of both."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

from ragcachekit.search.checks import DocumentId, Float32


@dataclass(frozen=True)
class Record:
    """A document: its id, text and metadata (JSON values), and the index version that stored it."""

    id: DocumentId
    text: str
    metadata: dict[str, Any]
    version: int = 0


@dataclass(frozen=True, eq=False)
class IndexChange:
    """What a listener is told about a change.

    ``version`` is the index version after it, ``gone`` the ids that were deleted or replaced, and
    ``embeddings`` ``[n, dim]`` the vectors that came (unit vectors under cosine). Both are None where
    another process made changes that cannot be listed any more: then any document may have changed.
    """

    version: int
    gone: tuple[DocumentId, ...] | None
    embeddings: Float32 | None


class Hit(NamedTuple):
    """A found document and its distance, as :class:`~ragcachekit.search.results.SearchResult` defines it."""

    record: Record
    score: float


Where: TypeAlias = Mapping[str, Any] | Callable[[Record], bool]
"""A filter: metadata values that must be equal, or a predicate."""


def as_records(
    ids: Sequence[DocumentId], texts: Sequence[str], metadatas: Sequence[Mapping[str, Any]] | None
) -> tuple[Record, ...]:
    """Checked copies of the documents. ValueError for other lengths, TypeError for what is no JSON value."""
    if isinstance(texts, str):
        raise TypeError("texts must be a sequence of texts, not one string")
    if len(texts) != len(ids) or (metadatas is not None and len(metadatas) != len(ids)):
        given = len(texts) if metadatas is None else f"{len(texts)} and {len(metadatas)}"
        raise ValueError(f"{len(ids)} ids need as many texts and metadatas, got {given}")
    return tuple(map(_as_record, ids, texts, repeat({}) if metadatas is None else metadatas))


def as_predicate(where: Where) -> Callable[[Record], bool]:
    """The filter as a function; TypeError for anything else."""
    if callable(where):
        return where
    if not isinstance(where, Mapping):
        raise TypeError(f"where must be a mapping or a callable, not {type(where).__name__}")
    wanted = dict(where)
    return lambda record: all(
        name in record.metadata and record.metadata[name] == value for name, value in wanted.items()
    )


def _as_record(one: DocumentId, text: str, metadata: Mapping[str, Any]) -> Record:
    if not isinstance(text, str):
        raise TypeError(f"the text of document {one!r} must be a str, not {type(text).__name__}")
    if not isinstance(metadata, Mapping):
        raise TypeError(f"the metadata of document {one!r} must be a mapping, not {type(metadata).__name__}")
    try:
        _check_json(dict(metadata), f"the metadata of document {one!r}")
        return Record(one, text, json.loads(json.dumps(dict(metadata))))
    except RecursionError as error:
        raise ValueError(f"the metadata of document {one!r} is nested too deeply") from error


def _check_json(value: Any, name: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}, which JSON cannot hold; leave it out or store it as text")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r}; keys must be strings")
            _check_json(inner, f"{name}[{key!r}]")
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            _check_json(inner, f"{name}[{at}]")
    elif value is not None and not isinstance(value, str | int | float):
        raise TypeError(f"{name} is a {type(value).__name__}; use str, int, float, bool, None, list, dict")
