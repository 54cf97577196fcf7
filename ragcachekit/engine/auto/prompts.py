"""Prompts on which the check of ``auto`` measures: a namespace's last ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock

from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.types import Ids

PROMPTS = 16
"""Most prompts of one check, and prompts kept per namespace."""

MOST_TOKENS = 1 << 20
"""Tokens of all kept prompts together."""


@dataclass(frozen=True)
class CheckPrompt:
    """A tokenised prompt, and its chunks' texts by their ids, as far as known."""

    segments: tuple[TokenSegment, ...]
    texts: Mapping[Ids, str] = field(default_factory=dict, compare=False)

    @property
    def token_ids(self) -> Ids:
        """The whole prompt."""
        return tuple(chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def tells(self) -> bool:
        """Whether candidates can differ in it: it has two chunks or more, and something behind them."""
        chunks = sum(segment.is_chunk for segment in self.segments)
        return chunks > 1 and not self.segments[-1].is_chunk


class SeenPrompts:
    """The last :data:`PROMPTS` different prompts of each namespace with two chunks or more, in memory only.

    Beyond :data:`MOST_TOKENS`, those of the namespace without a prompt for longest are dropped. Thread safe.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._seen: OrderedDict[str, list[CheckPrompt]] = OrderedDict()
        self._tokens = 0

    def observe(self, namespace: str, prompt: CheckPrompt) -> None:
        """Keep a prompt."""
        if not prompt.tells:
            return
        with self._lock:
            old = self._seen.pop(namespace, [])
            self._seen[namespace] = new = [*(other for other in old if other != prompt), prompt][-PROMPTS:]
            self._tokens += _tokens(new) - _tokens(old)
            while self._tokens > MOST_TOKENS:
                self._tokens -= _tokens(self._seen.popitem(last=False)[1])

    def of(self, namespace: str) -> tuple[CheckPrompt, ...]:
        """The kept prompts, the last one first."""
        with self._lock:
            return tuple(reversed(self._seen.get(namespace, ())))

    def forget(self, namespace: str) -> None:
        """Drop the prompts of a namespace."""
        with self._lock:
            self._tokens -= _tokens(self._seen.pop(namespace, []))


def _tokens(prompts: list[CheckPrompt]) -> int:
    return sum(len(segment.token_ids) for prompt in prompts for segment in prompt.segments)
