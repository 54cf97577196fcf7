"""The partition of a retriever's results: what decides, beside the question, what it finds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ragcachekit.config import positive
from ragcachekit.query.base import LogOnce, Partition
from ragcachekit.query.partition.keys import NotKeyable, index_versions, object_key
from ragcachekit.query.partition.rules import KeyRules

log = logging.getLogger(__name__)

_bypassed: ContextVar[bool] = ContextVar("ragcachekit_query_cache_bypassed", default=False)


@contextmanager
def bypass_query_cache() -> Iterator[None]:
    """Let every retriever called inside search, neither reading nor filling its query cache.

    Holds for this thread and for asyncio tasks begun inside. What is found is still registered with the
    engine.

    Examples
    --------
    >>> with bypass_query_cache():
    ...     found = retriever.retrieve("Where is Oslo?")  # doctest: +SKIP
    """
    token = _bypassed.set(True)
    try:
        yield
    finally:
        _bypassed.reset(token)


class Partitioner:
    """Makes partitions out of a retriever and a call, or logs why the call cannot be cached.

    A partition holds the retriever's attributes at any depth, the versions of its indexes, and the
    arguments of the call. Code outside the known libraries may depend on anything: what it finds is not
    cached, unless it names what counts.

    ``custom`` is called with the ``question`` of :meth:`partition` and gives what counts instead of the
    retriever and the run. None from it: do not cache. ``version`` is called without arguments at every
    question and names the state of an index that others change.
    """

    def __init__(
        self,
        rules: KeyRules,
        custom: Callable[..., object] | None = None,
        version: Callable[[], object] | None = None,
    ) -> None:
        self._rules, self._custom, self._version = rules, custom, version
        self._warn = LogOnce(log)

    def partition(
        self,
        namespace: str,
        k: int,
        retriever: object,
        arguments: object,
        *,
        configurable: object = None,
        question: tuple[object, ...] = (),
    ) -> Partition | None:
        """The partition, or None if the call must not be cached; the reason is logged once.

        ``arguments`` are the search arguments of the call, ``configurable`` the values of its run that the
        retriever may read, ``question`` the arguments of ``custom``. ValueError or TypeError for a ``k`` that
        is no positive integer.
        """
        positive("k", k)
        if _bypassed.get():
            return None
        try:
            called = object_key((arguments, self._present_version()), self._rules)
            if self._custom is None:
                found, run = object_key(retriever, self._rules), object_key(configurable, self._rules)
                return Partition(namespace, k, called, found, run)
            counts = self._custom(*question)
            if counts is None:
                return None
            versions = index_versions(retriever, self._rules)
            return Partition(namespace, k, called, object_key(counts, self._rules), versions)
        except Exception as error:  # of the user's code, too; and other threads may change what is read
            self._refuse(type(retriever).__name__, error)
            return None

    def of_own_index(
        self, namespace: str, index: Hashable, where: object, question: tuple[object, ...] = ()
    ) -> Partition | None:
        """The partition of an index that reports its changes; None if the call must not be cached.

        It holds plain values, so that it is the same after a restart. ``where`` is the filter of the search.
        """
        if _bypassed.get():
            return None
        try:
            counts = None if self._custom is None else self._custom(*question)
            if self._custom is not None and counts is None:
                return None
            parts = (where, counts, self._present_version())
            filters, run, version = (
                None if part is None else object_key(part, self._rules) for part in parts
            )
            return Partition(namespace, 1, filters, run, (index, version))
        except Exception as error:
            self._refuse("the index", error)
            return None

    def changes_of(self, index: object) -> Hashable:
        """Number of changes of an index, as far as they can be seen."""
        return index_versions(index, self._rules)

    def _present_version(self) -> object:
        return None if self._version is None else self._version()

    def _refuse(self, what: str, error: Exception) -> None:
        why = str(error) if isinstance(error, NotKeyable) else repr(error)
        self._warn(
            f"results of {what} are not cached, as what they depend on cannot be read ({why}); "
            "pass partition= to name what counts"
        )

    def is_unchanged(self, before: object, after: Partition | None) -> bool:
        """Whether what a search found belongs to the partition that was read before it."""
        if after == before:
            return True
        if after is not None and after.search_kwargs != getattr(before, "search_kwargs", None):
            self._warn(
                "the retriever's attributes changed during a search, so its result is not cached; if the "
                "search itself changes them (a counter, a list), pass partition= to name what counts"
            )
        return False
