"""One request of a batch, from its first token to its last."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from ragcachekit.forward.batch.request_kv import RequestKV
from ragcachekit.forward.own_rows import OwnRows
from ragcachekit.generate.batch.sampling import Sampling
from ragcachekit.generate.hooks import StopStrings
from ragcachekit.generate.run import Generated


class OpenStreamer(BaseStreamer):  # type: ignore[misc]
    """Passes tokens on, and not the end that generate sees after the prefill."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def put(self, value: torch.Tensor) -> None:
        """Pass on the prompt or a token."""
        self._inner.put(value)

    def end(self) -> None:
        """The request goes on."""


class Decoding:
    """A request that is decoded in a batch, or ended.

    Attributes
    ----------
    token_ids : list of int
        The new tokens so far.
    finished : bool
        Whether no more tokens will come.
    error : BaseException or None
        What sampling, the streamer or stop strings of this request raised; :meth:`generated` raises it.
    """

    def __init__(
        self,
        prefilled: Generated,
        sampling: Sampling,
        stop: StopStrings,
        streamer: Any,
        cancel: threading.Event | None,
        begun: float,
    ) -> None:
        self.plan, self.sampling = prefilled.plan, sampling
        self.kv: RequestKV | None = None
        self.token_ids = list(prefilled.token_ids)
        self.finished, self.cancelled = False, prefilled.cancelled
        self.error: BaseException | None = None
        self._prefilled, self._stop, self._streamer = prefilled, stop, streamer
        self._cancel, self._begun = cancel, begun
        if self._is_done():
            self.end()

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and the longest possible answer."""
        return len(self.plan.token_ids) + self.sampling.max_new_tokens

    @property
    def own(self) -> OwnRows | None:
        """What was observed of entries that the prefill computed."""
        return self._prefilled.own

    def hold_kv(self) -> None:
        """Move the prompt's KV from its cache to buffers with room; let go of the entries that it reused."""
        rest = self.sampling.max_new_tokens - len(self.token_ids)
        self.kv = RequestKV(self._prefilled.cache, len(self.plan.token_ids), rest)
        self.plan = self.plan.without_kv()
        self._prefilled = replace(self._prefilled, cache=None, plan=self.plan)

    def push(self, token: int) -> None:
        """Add a token; the request ends with it or goes on."""
        try:
            if self.error is not None:
                raise self.error
            self.token_ids.append(token)
            if self._streamer is not None:
                self._streamer.put(torch.tensor([token]))
            if self._is_done():
                self.end()
        except BaseException as error:  # of this request's own code: the others go on
            self.error, self.finished = error, True

    def end(self) -> None:
        """Take no more tokens, and end the streamer; only the first call counts."""
        if self.finished:
            return
        self.finished = True
        try:
            if self._streamer is not None:
                self._streamer.end()
        except BaseException as error:
            self.error = error

    def end_if_cancelled(self) -> bool:
        """End the request where its event is set; whether it has ended."""
        if not self.finished and self._cancel is not None and self._cancel.is_set():
            self.cancelled = True
            self.end()
        return self.finished

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token ``[1]``, out of ``logits`` ``[1, vocab]`` in float32."""
        try:
            return self.sampling.choose((*self.plan.token_ids, *self.token_ids), logits)
        except BaseException as error:  # its processor's, or NaN among the logits
            self.error = error
            return logits.argmax(-1)

    def generated(self, cancelled: bool = False) -> Generated:
        """What ``run_generate`` returns, so far; raises ``error`` if there is one.

        The cache's rows do not change while the request goes on.
        """
        if self.error is not None:
            raise self.error
        return replace(
            self._prefilled,
            token_ids=tuple(self.token_ids),
            ended=self._at_end,
            cancelled=self.cancelled or cancelled,
            cache=self._prefilled.cache if self.kv is None else self.kv.as_cache(),
        )

    @property
    def _at_end(self) -> bool:
        return bool(self.token_ids) and self.token_ids[-1] in self.sampling.ends

    def _is_done(self) -> bool:
        sampling = self.sampling
        if self._cancel is not None and self._cancel.is_set():
            self.cancelled = True
        return (
            self.cancelled
            or self._at_end
            or len(self.token_ids) >= sampling.max_new_tokens
            or (sampling.max_time is not None and time.perf_counter() - self._begun > sampling.max_time)
            or self._stop.end(self.token_ids)
        )
