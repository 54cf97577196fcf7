"""The partition of a retriever's results: everything that decides, beside the question, what it finds."""

from __future__ import annotations

import contextvars
import datetime
import decimal
import logging
import sys
from collections.abc import Callable, Hashable

from ragcachekit.query.base import Partition
from ragcachekit.query.key_walk import index_versions, object_key
from ragcachekit.query.keys import KeyRules, NotKeyable

log = logging.getLogger(__name__)

_OF_EXTENSIONS = (decimal.Context, type(datetime.datetime_CAPI))
"""Values of the context variables that decimal and numpy keep where no module names them."""


class Partitioner:
    """Makes partitions out of a retriever and a call, or says why the call cannot be cached.

    A partition holds the retriever's attributes at any depth, the versions of its indexes, and the
    arguments of the call. Where code outside the known libraries takes part, what that reads is added:
    class attributes, closures, names of its module, and the context of the call (context variables,
    run metadata). Databases, files, clocks and threads' own variables cannot be seen.

    Parameters
    ----------
    rules : KeyRules
    ignored_variables : tuple of ContextVar
        Context variables of the framework that are part of the call's arguments already.
    custom : callable, optional
        What the user says that counts, called with what :meth:`partition` got as ``question``; it stands
        in for the retriever and the context. None from it: do not cache.
    """

    def __init__(
        self,
        rules: KeyRules,
        ignored_variables: tuple[contextvars.ContextVar[object], ...] = (),
        custom: Callable[..., object] | None = None,
    ) -> None:
        self._rules, self._custom = rules, custom
        self._known_variables: set[contextvars.ContextVar[object]] = set(ignored_variables)
        self._own_variables: set[contextvars.ContextVar[object]] = set()
        self._said: set[str] = set()

    def partition(
        self,
        namespace: str,
        k: int,
        retriever: object,
        arguments: object,
        *,
        question: tuple[object, ...] = (),
        context: object = None,
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
        question : tuple
            Arguments of ``custom``.
        context : object
            What the call carries beside its arguments, for code that may read it.

        Raises
        ------
        ValueError, TypeError
            For a ``k`` that is no positive integer.
        """
        plain = Partition.of(namespace, k)
        try:
            called = object_key(arguments, self._rules).key
            if self._custom is not None:
                return self._custom_partition(plain, retriever, called, question)
            found = object_key(retriever, self._rules)
            around = object_key((context, self._context()), self._rules).key if found.own_code else None
        except NotKeyable as error:
            self._refused(f"{type(retriever).__name__}: {error}")
            return None
        except Exception as error:  # attributes are the user's code too, and other threads may change them
            self._refused(f"{type(retriever).__name__}: {error!r}")
            return None
        return plain._replace(filters=called, search_kwargs=found.key, index_id=around)

    def is_unchanged(self, before: Partition, after: Partition | None) -> bool:
        """Whether what a search found belongs to the partition that was read before it.

        It does not if somebody changed the retriever meanwhile, or if the search itself does at every
        question; then nothing is ever kept, and the log says so once.
        """
        if after == before:
            return True
        if after is not None and after.search_kwargs != before.search_kwargs and "changed" not in self._said:
            self._said.add("changed")
            log.warning(
                "the retriever's attributes changed during a search, so its result is not cached; if the "
                "search itself changes them (a counter, a list), pass partition= to name what counts"
            )
        return False

    def _custom_partition(
        self, plain: Partition, retriever: object, called: Hashable, question: tuple[object, ...]
    ) -> Partition | None:
        assert self._custom is not None
        try:
            counts = self._custom(*question)
        except Exception:
            log.warning("partition= failed, searching without the query cache", exc_info=True)
            return None
        if counts is None:
            return None
        versions = index_versions(retriever, self._rules)
        return plain._replace(
            filters=called, search_kwargs=object_key(counts, self._rules).key, index_id=versions
        )

    def _refused(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.warning(
                "results are not cached, as what they depend on cannot be read (%s); "
                "pass partition= to name what counts",
                reason,
            )

    def _context(self) -> dict[contextvars.ContextVar[object], object]:
        """The context variables that are set and belong to no known library."""
        current = contextvars.copy_context()
        if not self._known_variables.union(self._own_variables).issuperset(current):
            self._known_variables |= _library_variables(self._rules)
            self._own_variables |= {one for one in current if one not in self._known_variables}
        own = ((one, value) for one, value in current.items() if one in self._own_variables)
        return {one: value for one, value in own if not isinstance(value, _OF_EXTENSIONS)}


def _library_variables(rules: KeyRules) -> set[contextvars.ContextVar[object]]:
    modules = [m for name, m in list(sys.modules.items()) if m is not None and rules.is_library(name)]
    return {
        value
        for module in modules
        for value in list(getattr(module, "__dict__", {}).values())
        if type(value) is contextvars.ContextVar  # isinstance() asks objects for their __class__
    }
