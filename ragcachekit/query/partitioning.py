"""The partition of a retriever's results: what decides, beside the question, what it finds."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from ragcachekit.query.base import Partition, positive
from ragcachekit.query.key_walk import object_key
from ragcachekit.query.keys import Identity, KeyRules, NotKeyable, ObjectKey, TooLarge, index_versions

log = logging.getLogger(__name__)

_MOST_LOGGED = 100
_MOST_INTERNED = 256


class Partitioner:
    """Makes partitions out of a retriever and a call, or logs why the call cannot be cached.

    A partition holds the retriever's attributes at any depth, the versions of its indexes, and the
    arguments of the call. Code outside the known libraries may depend on anything: what it finds is not
    cached, unless it names what counts.

    ``custom`` is called with the ``question`` of :meth:`partition` and gives what counts instead of the
    retriever and the run. None from it: do not cache.
    """

    def __init__(self, rules: KeyRules, custom: Callable[..., object] | None = None) -> None:
        self._rules, self._custom = rules, custom
        self._too_large: set[Identity] = set()
        self._logged: set[str] = set()
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

        ``arguments`` are the search arguments of the call, ``configurable`` its values for retrievers that
        are configured by it, ``question`` the arguments of ``custom``. ValueError or TypeError for a ``k``
        that is no positive integer.
        """
        positive("k", k)
        if self._custom is None and Identity(retriever) in self._too_large:
            return None
        try:
            called = object_key(arguments, self._rules).key
            if self._custom is None:
                found = self._found(retriever)
                run = object_key(configurable, self._rules).key if found.configurable else None
                return self._interned_as(Partition(namespace, k, called, found.key, run))
            counts = self._custom(*question)
            if counts is None:
                return None
            versions = index_versions(retriever, self._rules)
            counted = object_key(counts, self._rules).key
            return self._interned_as(Partition(namespace, k, called, counted, versions))
        except Exception as error:  # of the user's code, too; and other threads may change what is read
            why = str(error) if isinstance(error, NotKeyable) else repr(error)
            self._log_once(
                f"results of {type(retriever).__name__} are not cached, as what they depend on cannot be "
                f"read ({why}); pass partition= to name what counts"
            )
            return None

    def is_unchanged(self, before: object, after: Partition | None) -> bool:
        """Whether what a search found belongs to the partition that was read before it."""
        if after == before:
            return True
        if after is not None and after.search_kwargs != getattr(before, "search_kwargs", None):
            self._log_once(
                "the retriever's attributes changed during a search, so its result is not cached; if the "
                "search itself changes them (a counter, a list), pass partition= to name what counts"
            )
        return False

    def _found(self, retriever: object) -> ObjectKey:
        try:
            return object_key(retriever, self._rules)
        except TooLarge:
            if len(self._too_large) < _MOST_LOGGED:
                self._too_large.add(Identity(retriever))  # not to be read at every question
            raise

    def _interned_as(self, partition: Partition) -> Partition:
        """An equal one of before: keys of large retrievers would be stored with every entry."""
        with self._lock:
            known = self._interned.setdefault(partition, partition)
            self._interned.move_to_end(known)
            if len(self._interned) > _MOST_INTERNED:
                self._interned.popitem(last=False)
            return known

    def _log_once(self, message: str) -> None:
        if message not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(message)
            log.warning("%s", message)
