"""The partition of a retriever's results: everything that decides, beside the question, what it finds."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from ragcachekit.query.base import Partition, check_k
from ragcachekit.query.key_walk import object_key
from ragcachekit.query.keys import Identity, KeyRules, NotKeyable, ObjectKey, TooLarge
from ragcachekit.query.object_parts import index_versions

log = logging.getLogger(__name__)

_MAX_SAID = 100
_MAX_INTERNED = 256


class Partitioner:
    """Makes partitions out of a retriever and a call, or says why the call cannot be cached.

    A partition holds the retriever's attributes at any depth, the versions of its indexes, and the
    arguments of the call. Code outside the known libraries may depend on anything: what it finds is not
    cached, unless it says what counts.

    Parameters
    ----------
    rules : KeyRules
    custom : callable, optional
        What the user says that counts, called with what :meth:`partition` got as ``question``; it stands
        in for the retriever and the run. None from it: do not cache.
    """

    def __init__(self, rules: KeyRules, custom: Callable[..., object] | None = None) -> None:
        self._rules, self._custom = rules, custom
        self._too_large: set[Identity] = set()
        self._said: set[str] = set()
        self._interned: OrderedDict[Partition, Partition] = OrderedDict()
        self._lock = threading.Lock()

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

        Parameters
        ----------
        namespace, k
            As for :class:`Partition`; checked there.
        retriever : object
            What is searched on a miss.
        arguments : object
            What the call adds to it.
        configurable : object
            What the call says to retrievers that are configured by it.
        question : tuple
            Arguments of ``custom``.

        Raises
        ------
        ValueError, TypeError
            For a ``k`` that is no positive integer.
        """
        check_k(k)
        if self._custom is None and Identity(retriever) in self._too_large:
            return None
        try:
            called = object_key(arguments, self._rules).key
            if self._custom is None:
                found = self._found(retriever)
                run = object_key(configurable, self._rules).key if found.configurable else None
                return self._same(Partition(namespace, k, called, found.key, run))
            counts = self._custom(*question)
            if counts is None:
                return None
            versions = index_versions(retriever, self._rules)
            counted = object_key(counts, self._rules).key
            return self._same(Partition(namespace, k, called, counted, versions))
        except Exception as error:  # of the user's code, too; and other threads may change what is read
            self._refused(retriever, error)
            return None

    def _found(self, retriever: object) -> ObjectKey:
        try:
            return object_key(retriever, self._rules)
        except TooLarge:
            if len(self._too_large) < _MAX_SAID:
                self._too_large.add(Identity(retriever))  # it took long to find out
            raise

    def is_unchanged(self, before: Partition, after: Partition | None) -> bool:
        """Whether what a search found belongs to the partition that was read before it.

        It does not if somebody changed the retriever meanwhile, or if the search itself does at every
        question; then nothing is ever kept, and the log says so once.
        """
        if after == before:
            return True
        if after is not None and after.search_kwargs != before.search_kwargs:
            self._say(
                "the retriever's attributes changed during a search, so its result is not cached; if the "
                "search itself changes them (a counter, a list), pass partition= to name what counts"
            )
        return False

    def _same(self, partition: Partition) -> Partition:
        """An equal one of before: keys of large retrievers would be kept with every entry."""
        with self._lock:
            known = self._interned.setdefault(partition, partition)
            self._interned.move_to_end(known)
            if len(self._interned) > _MAX_INTERNED:
                self._interned.popitem(last=False)
            return known

    def _refused(self, retriever: object, error: Exception) -> None:
        why = str(error) if isinstance(error, NotKeyable) else repr(error)
        self._say(
            f"results of {type(retriever).__name__} are not cached, as what they depend on cannot be read "
            f"({why}); pass partition= to name what counts"
        )

    def _say(self, message: str) -> None:
        if message not in self._said and len(self._said) < _MAX_SAID:
            self._said.add(message)
            log.warning("%s", message)
