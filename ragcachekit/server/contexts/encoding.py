"""The chunks of contexts are encoded beside requests, a few of each owner by turns."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from threading import Event

from ragcachekit import CancelScope, RagCache
from ragcachekit.engine.active_requests import GiveWay
from ragcachekit.engine.asyncio_api import to_thread

_PLACE = "Zq7xContext"  # in no template
_TURN = 8192  # characters, with the chunk that reaches it
_SHARE = 0.5  # of the time is for encoding while requests run


class ContextEncoder:
    """Encodes one owner's chunks at a time, and changes to the next owner after some. For one event loop.

    While requests run it takes half of the time.
    """

    def __init__(self, rag: RagCache) -> None:
        self._rag, self._encoding = rag, asyncio.Lock()
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def count(self, texts: Sequence[str]) -> int:
        """Tokens of all texts."""
        return await to_thread(lambda: sum(self._rag.count_tokens(text) for text in texts if text))

    async def encode(self, chunks: Sequence[str], namespace: str, system: str | None) -> tuple[str, ...]:
        """The ids of chunks as of ``RagCache.encode``, once they are encoded behind the system message."""
        before = await asyncio.to_thread(self._before, system)
        # As one list: encoders with neighbours take them from it.
        await to_thread(self._rag.register, chunks, namespace=namespace)
        encode = partial(self._rag.encode, namespace=namespace, system=before)
        ids, give_way = list[str](), partial(GiveWay(self._rag.queue, _SHARE), Event())
        for turn in _turns(chunks):
            # Per namespace one turn waits for its place, however many contexts it makes.
            async with self._turns[namespace], self._encoding:
                with CancelScope(pause=give_way):
                    ids += await to_thread(encode, turn)
        return tuple(ids)

    def _before(self, system: str | None) -> str | None:
        """The text before a prompt's first chunk, as the chat template renders it; None if it cannot."""
        user = {"role": "user", "content": _PLACE}
        messages = [{"role": "system", "content": system}, user] if system else [user]
        try:
            text = self._rag.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # a template raises what it likes, as without a system role
            return None
        before, place, _ = str(text).partition(_PLACE)
        return before if place else None


def _turns(chunks: Sequence[str]) -> Iterator[list[str]]:
    turn, size = list[str](), 0
    for chunk in chunks:
        turn.append(chunk)
        size += len(chunk)
        if size >= _TURN:
            yield turn
            turn, size = [], 0
    if turn:
        yield turn
