"""Observers of requests and of query cache lookups: what metrics and traces are made from."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from ragcachekit.reports import GenerateReport
from ragcachekit.threads import attempt
from ragcachekit.types import Prompt


@dataclass(frozen=True)
class RequestStart:
    """A request as it came in, without its prompt.

    - ``operation``: ``chat`` for messages, ``text_completion`` for strings and segments.
    - ``options``: Those for ``model.generate``, as given.
    - ``started_ns``: When it was asked, in nanoseconds of :func:`time.time_ns`.
    """

    operation: Literal["chat", "text_completion"]
    namespace: str
    options: Mapping[str, Any]
    started_ns: int


@dataclass(frozen=True)
class QueryLookup:
    """A lookup in a query cache, without question and documents.

    - ``result``: ``hit``, ``miss``, ``refused`` (an entry within the tolerance was not used: the guard
      refused it, or it had expired) or ``failed`` (the cache could not use the embedding).
    - ``started_ns``: When it began, in nanoseconds of :func:`time.time_ns`.
    - ``documents``: Documents of a hit, or of the search after another result.
    - ``search_seconds``: From the end of the lookup to that of the search; None before a search.
    """

    result: Literal["hit", "miss", "refused", "failed"]
    started_ns: int
    lookup_seconds: float
    distance: float | None
    documents: int
    search_seconds: float | None = None


class Observer:
    """Base of observers, with methods that do nothing; see :meth:`ragcachekit.RagCache.add_observer`.

    Errors are logged and do not affect answers. A slow method delays its request, or all queued requests.
    Export from a thread of your own.
    """

    def request_started(self, start: RequestStart) -> object:
        """Called in the thread and context of the call, before its prompt is read.

        Returns anything; :meth:`request_ended` is given it.
        """

    def request_ended(self, token: Any, report: GenerateReport | None, error: BaseException | None) -> None:
        """Called once per request, with the report of its answer or with what was raised instead.

        The thread is that of the call or, for queued requests, mostly the engine's.
        """

    def looked_up(self, lookup: QueryLookup) -> None:
        """Called after each lookup of a query cache, in the thread that asks."""

    def searched(self, lookup: QueryLookup) -> None:
        """Called after the search that followed a lookup without a hit."""


class ObservedRequest:
    """The observers of one request; as a context manager, what is raised ends it."""

    def __init__(self, tokens: tuple[tuple[Observer, object], ...]) -> None:
        self._tokens = tokens

    def end(self, report: GenerateReport | None = None, error: BaseException | None = None) -> None:
        """Tell the observers; later calls do nothing."""
        tokens, self._tokens = self._tokens, ()
        for observer, token in tokens:
            attempt(observer.request_ended, token, report, error)

    def __enter__(self) -> ObservedRequest:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self.end(error=error)


class Observers:
    """The observers of one engine and its query caches; ``all`` of them."""

    def __init__(self) -> None:
        self.all: tuple[Observer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.all)

    def add(self, observer: Observer) -> None:
        """Add an observer, once; TypeError for another type."""
        if not isinstance(observer, Observer):
            raise TypeError(f"an observer is an instance of ragcachekit.Observer, not {observer!r}")
        if observer not in self.all:
            self.all = (*self.all, observer)

    def remove(self, observer: Observer) -> None:
        """Remove an observer; no error if it is none."""
        self.all = tuple(one for one in self.all if one is not observer)

    def begin(
        self, begun: float, prompt: object, namespace: str, options: Mapping[str, Any]
    ) -> ObservedRequest:
        """Tell of a request; ``begun`` in seconds of :func:`time.perf_counter`."""
        operation = "text_completion" if isinstance(prompt, str | Prompt) else "chat"
        start = RequestStart(operation, namespace, options, epoch_ns(begun))  # type: ignore[arg-type]
        return ObservedRequest(tuple((one, attempt(one.request_started, start)) for one in self.all))

    def looked_up(self, lookup: QueryLookup) -> None:
        """Tell of a lookup."""
        for observer in self.all:
            attempt(observer.looked_up, lookup)

    def searched(self, lookup: QueryLookup) -> None:
        """Tell of the search after a lookup."""
        for observer in self.all:
            attempt(observer.searched, lookup)


def epoch_ns(begun: float) -> int:
    """Nanoseconds of :func:`time.time_ns` at a time of :func:`time.perf_counter`."""
    return time.time_ns() - int((time.perf_counter() - begun) * 1e9)


def model_name(model: Any) -> str:
    """What metrics and traces call a model: its hub id, the name of its folder, or its class."""
    name = str(getattr(model.config, "name_or_path", "") or "")
    if PurePath(name).is_absolute() or name.startswith("."):
        name = PurePath(name).name
    return name or type(model).__name__
