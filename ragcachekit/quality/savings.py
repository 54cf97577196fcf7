"""Whether what reuse has saved so far pays for a check."""

from __future__ import annotations

from math import inf

from ragcachekit.quality.check import MAX_SECONDS

CHECK_PREFILLS = 10
"""Prefills of each of its prompts that a check takes about: in full, of encodings, and of candidates."""

MIN_SAVED = 4
"""Multiple of a check's time that must have been saved: it takes a quarter of what reuse gained, at most."""


class Savings:
    """Seconds by which the first tokens of a namespace's prompts came sooner than by full prefills.

    A full prefill is estimated by the quickest so far, per row, of those that computed half a prompt or more.
    Prompts before the first such prefill do not count.
    """

    def __init__(self) -> None:
        self.seconds, self._per_row = 0.0, inf

    def add(self, tokens: int, rows: int, seconds: float) -> None:
        """Count a prompt of ``tokens`` whose first token took ``seconds``, with ``rows`` of them computed."""
        if 2 * rows >= tokens:
            self._per_row = min(self._per_row, seconds / rows)
        if self._per_row < inf:
            self.seconds += max(0.0, self._per_row * tokens - seconds)

    def pay_for_check(self, tokens: int) -> bool:
        """Whether they are :data:`MIN_SAVED` times what a check of prompts with ``tokens`` in all would take.

        True where no prompt was computed: its chunks were encoded ahead, so its user wants them used well.
        """
        if self._per_row == inf:
            return True
        return self.seconds >= MIN_SAVED * min(MAX_SECONDS, CHECK_PREFILLS * self._per_row * tokens)
