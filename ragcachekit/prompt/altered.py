"""Retrieved chunks that stand altered in a prompt: why nothing was reused."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from itertools import groupby

from ragcachekit.types import Chunk, Prompt

MOST_NAMESPACES = 1024
MOST_CHUNKS = 64  # those retrieved last in a namespace
SHORTEST, LONGEST = 16, 64  # characters of a chunk's beginning: fewer are in many texts, more may be cut off
MOST_SEARCHED = 1 << 18  # characters of a prompt's fixed text


class Retrieved:
    """Beginnings of the chunks retrieved last in each namespace, whitespace and case aside."""

    def __init__(self) -> None:
        self._begin: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        self._lock = threading.Lock()

    def observe(self, namespace: str, texts: Iterable[str]) -> None:
        """Add texts that were retrieved."""
        last = list(texts)[-MOST_CHUNKS:]
        begin = [beginning for text in last if len(beginning := _beginning(text)) >= SHORTEST]
        with self._lock:
            known = self._begin.setdefault(namespace, OrderedDict())
            for beginning in begin:
                known[beginning] = None
                known.move_to_end(beginning)
            while len(known) > MOST_CHUNKS:
                known.popitem(last=False)
            self._begin.move_to_end(namespace)
            if len(self._begin) > MOST_NAMESPACES:
                self._begin.popitem(last=False)

    def forget(self, namespace: str) -> None:
        """Forget what was retrieved in the namespace."""
        with self._lock:
            self._begin.pop(namespace, None)

    def altered(self, namespace: str, prompt: Prompt) -> tuple[str, ...]:
        """The note for a prompt whose fixed text has a retrieved chunk, whitespace and case aside."""
        with self._lock:
            begin = set(self._begin.get(namespace, ()))
        if begin:
            begin -= {_beginning(s.text or "") for s in prompt.segments if isinstance(s, Chunk)}
        if not begin:
            return ()
        runs = groupby(prompt.segments, lambda s: isinstance(s, Chunk))
        texts = ("".join(s.text or "" for s in run) for is_chunk, run in runs if not is_chunk)
        fixed = "\n".join(_plain(text[:MOST_SEARCHED]) for text in texts)
        count = sum(beginning in fixed for beginning in begin)
        if not count:
            return ()
        chunks = f"{count} retrieved chunk{'s stand' if count > 1 else ' stands'}"
        return (
            f"{chunks} in the prompt, but altered (whitespace, case, length, a word that runs on, ...), and "
            "only verbatim chunks are reused: let the chain put in their text as it is",
        )


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _beginning(text: str) -> str:
    # A slice first: chunks are long. Four times as much, for there may be whitespace in it.
    return _plain(text.lstrip()[: 4 * LONGEST])[:LONGEST]
