"""What was forgotten, so that work which began before a forget stores nothing of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from threading import Lock

from ragcachekit.types import KVKey, whole_id

MIN_OVERLAP = 3
"""Characters of a forgotten text with which a kept beginning may end: fewer say nothing of it."""


class ForgottenTexts:
    """Finds texts in token ids that ``decode`` makes text of, special tokens shown and nothing cleaned up.

    Whitespace does not count: chains strip texts and wrap their lines, and tokenizers add blanks. A text that
    a tokenizer normalises should be given in its decoded form as well. Blank ones are ignored.
    """

    def __init__(self, texts: Iterable[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._texts = tuple(dict.fromkeys(filter(None, map(_squeezed, texts))))
        self._decode = decode

    def in_text(self, text: str) -> bool:
        text = _squeezed(text)
        return any(one in text for one in self._texts)

    def within(self, token_ids: Sequence[int]) -> bool:
        return self.in_text(self._decode(token_ids))

    def begin_in(self, token_ids: Sequence[int]) -> bool:
        """As :meth:`within`, or the ids end inside one."""
        return self._start(_squeezed(self._decode(token_ids))) is not None

    def first_part(self, parts: Sequence[Sequence[int]]) -> int | None:
        """Number of the part in which the first of them begins, or that a text at the end begins in."""
        ids = [token for part in parts for token in part]
        start = self._start(_squeezed(self._decode(ids)))
        if start is None:
            return None
        ends = list(accumulate(map(len, parts)))
        after = bisect_right(ends, start, key=lambda end: len(_squeezed(self._decode(ids[:end]))))
        return min(after, len(parts) - 1)

    def _start(self, text: str) -> int | None:
        places = [place for one in self._texts if (place := text.find(one)) >= 0]
        for one in self._texts:
            sizes = range(min(len(one), len(text)), MIN_OVERLAP - 1, -1)
            places += [len(text) - size for size in sizes if text.endswith(one[:size])][:1]
        return min(places, default=None)


def _squeezed(text: str) -> str:
    return "".join(text.split())


MAX_NAMES = 100_000
MAX_TEXTS = 64  # forgets of texts


@dataclass
class _Namespace:
    whole: int = 0  # epoch of the last forget of everything
    last: dict[str, int] = field(default_factory=dict)  # name to that epoch
    texts: list[tuple[int, ForgottenTexts]] = field(default_factory=list)  # with their epochs


class ForgetEpochs:
    """A count of forgets, and for each chunk the count at its last one. Thread safe.

    Work reads :attr:`epoch` before its first lookup, and stores a result inside ``storing`` if nothing it
    depends on was forgotten since. A forget is added inside ``storing`` and ``storing_in_tree`` when it has
    reached every tier. :data:`MAX_NAMES` names and the texts of :data:`MAX_TEXTS` forgets of one namespace
    are remembered; beyond that, the last one counts as one of the whole namespace: earlier work is lost.
    """

    def __init__(self) -> None:
        self.epoch = 0
        """The number of forgets so far."""
        self._namespaces: dict[str, _Namespace] = {}
        self._lock = Lock()
        self.storing = Lock()
        """Around storing, and around forgetting in every tier."""
        self.storing_in_tree = Lock()
        """The same for the knowledge tree, whose disk would delay encoding; taken second."""

    def add(
        self,
        namespace: str,
        chunk_ids: Iterable[str] | None = None,
        texts: Iterable[str] = (),
        within: ForgottenTexts | None = None,
    ) -> None:
        """Count a forget of chunks and texts; without ids, of the whole namespace.

        ``within`` finds the texts where they are part of what was computed.
        """
        with self._lock:
            epoch = self.epoch + 1
            known = self._namespaces.setdefault(namespace, _Namespace())
            if within is not None:
                known.texts.append((epoch, within))
            if chunk_ids is not None:
                known.last.update(dict.fromkeys([*chunk_ids, *map(_name, texts)], epoch))
            if chunk_ids is None or len(known.last) > MAX_NAMES or len(known.texts) > MAX_TEXTS:
                self._namespaces[namespace] = _Namespace(whole=epoch)
            self.epoch = epoch

    def forgot(self, key: KVKey, since: int) -> bool:
        """Whether the chunk, or one of its context, was forgotten after ``since``."""
        return self.forgot_any(key.namespace, (key.chunk_id, *key.context), since)

    def forgot_text(self, namespace: str, text: str, since: int) -> bool:
        """As :meth:`forgot`, for a chunk's text without outer whitespace."""
        return self.forgot_any(namespace, (_name(text),), since)

    def forgot_any(self, namespace: str, names: Iterable[str], since: int) -> bool:
        """As :meth:`forgot`, for any of several chunk ids."""
        if self.epoch == since:
            return False
        with self._lock:
            known = self._namespaces.get(namespace, _Namespace())
            return known.whole > since or any(known.last.get(whole_id(name), 0) > since for name in names)

    def forgot_within(
        self, namespace: str, token_ids: Sequence[int] | None, since: int, *, ends: bool = False
    ) -> bool:
        """Whether KV of these token ids (None: unknown) may hold a text that was forgotten after ``since``.

        With ``ends`` also whether it ends inside one.
        """
        if self.epoch == since:
            return False
        with self._lock:
            known = self._namespaces.get(namespace, _Namespace())
            whole, later = known.whole, [within for epoch, within in known.texts if epoch > since]
        if token_ids is None:
            return whole > since or bool(later)
        return whole > since or any((one.begin_in if ends else one.within)(token_ids) for one in later)


def _name(text: str) -> str:
    """The digest of a text; no chunk id has this form."""
    return "text:" + blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
