"""Texts to forget, found in the token ids that KV was computed from."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

LEAST_OVERLAP = 3
"""Characters of a forgotten text with which a kept beginning may end: fewer say nothing of it."""


class ForgottenTexts:
    """Finds texts in decoded token ids.

    Whitespace does not count: chains strip texts and wrap their lines, and tokenizers add blanks. A text that
    a tokenizer normalises should be given in its decoded form as well.

    Parameters
    ----------
    texts : iterable of str
        Blank ones are ignored: every prompt would hold them.
    decode : callable
        Token ids to text, special tokens shown and nothing cleaned up.
    """

    def __init__(self, texts: Iterable[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._texts = tuple(dict.fromkeys(filter(None, map(_squeezed, texts))))
        self._decode = decode

    def in_text(self, text: str) -> bool:
        """Whether a text holds one of them."""
        text = _squeezed(text)
        return any(one in text for one in self._texts)

    def within(self, token_ids: Sequence[int]) -> bool:
        """Whether the decoded ids hold one of them."""
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
            sizes = range(min(len(one), len(text)), LEAST_OVERLAP - 1, -1)
            places += [len(text) - size for size in sizes if text.endswith(one[:size])][:1]
        return min(places, default=None)


def _squeezed(text: str) -> str:
    return "".join(text.split())
