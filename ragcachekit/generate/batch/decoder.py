"""Several requests decoded together: each is prefilled by generate, then gets one token per forward."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from ragcachekit.forward.batch.decode import decode
from ragcachekit.forward.own_rows import MOST_HELD
from ragcachekit.generate.batch.check import why_not_together
from ragcachekit.generate.batch.decoding import Decoding, OpenStreamer
from ragcachekit.generate.batch.sampling import Sampling, not_decoded
from ragcachekit.generate.hooks import FirstScores, StopStrings
from ragcachekit.generate.options import without_refused_defaults
from ragcachekit.generate.replan import Replan
from ragcachekit.generate.run import Generated, run_generate
from ragcachekit.model.layout import KVLayout
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan


class BatchDecoder:
    """Decodes several linked prompts with one forward per token.

    A new request joins between two forwards. Each attends over buffers of its own, so none is padded to
    another's length. Not thread-safe: one thread uses it. Forwards of other threads on the model may run at
    the same time.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With our attention installed.
    rope : Rope
    decode : callable
        As for :func:`~ragcachekit.generate.run.run_generate`.
    max_batch : int
        Requests that are decoded together at most.
    max_bytes : int
        Bytes of KV of their prompts and longest answers at most; a request alone may exceed it.
    """

    def __init__(
        self,
        model: Any,
        rope: Rope,
        *,
        decode: Callable[[Sequence[int]], str],
        max_batch: int,
        max_bytes: int,
    ) -> None:
        self._model, self._rope, self._decode = model, rope, decode
        self._run = partial(run_generate, model, rope, decode=decode)
        self._max_batch, self._max_bytes = max_batch, max_bytes
        self._active: list[Decoding] = []

    @property
    def active(self) -> Sequence[Decoding]:
        """The requests that the next step gives a token each."""
        return tuple(self._active)

    def unsupported(self, options: Mapping[str, Any]) -> str | None:
        """Why a request with these options of generate has to :meth:`run` alone, or None.

        The first call checks the model, by a few forwards over some twenty tokens.
        """
        if options.get("generation_config") is not None:
            return "a generation_config of its own is not decoded in a batch"
        if self._rope.depends_on_length:
            return "rotary frequencies that depend on the length are not decoded in a batch"
        name = not_decoded(options, self._model.generation_config)
        return self._why_not_together if name is None else f"{name} is not decoded in a batch"

    def has_room(self, tokens: int) -> bool:
        """Whether a request of so many tokens, prompt and longest answer, may begin."""
        if not self._active:
            return True
        held = sum(min(decoding.tokens, self._rope.context) for decoding in self._active)
        fits = (held + tokens) * self._token_bytes <= self._max_bytes
        return fits and len(self._active) < self._max_batch

    def begin(
        self,
        plan: LinkPlan,
        options: Mapping[str, Any],
        *,
        stop: Sequence[str] = (),
        cancel: threading.Event | None = None,
        first: FirstScores | None = None,
        own: bool = False,
        replan: Replan | None = None,
    ) -> Decoding:
        """Prefill a request and choose its first token; it is active unless it ended with that.

        Arguments are those of :func:`~ragcachekit.generate.run.run_generate`, and its errors are raised.
        Only for options of which :meth:`unsupported` names none.
        """
        begun, streamer = time.perf_counter(), options.get("streamer")
        defaults = self._model.generation_config
        one = {**options, "max_new_tokens": 1}
        if streamer is not None:
            one["streamer"] = OpenStreamer(streamer)
        prefilled = self._run(plan, one, cancel=cancel, first=first, own=own, replan=replan, whole=True)
        sampling = Sampling.of(without_refused_defaults(options, defaults), defaults, self._model.device)
        stops = StopStrings(stop, self._decode, 0)
        decoding = Decoding(prefilled, sampling, stops, streamer, cancel, begun)
        if not decoding.finished:
            decoding.hold_kv()
            self._active.append(decoding)
            if decoding.own and sum(one.own.nbytes for one in self._active if one.own) > MOST_HELD:
                decoding.own.settle()
        return decoding

    def run(self, plan: LinkPlan, options: Mapping[str, Any], **asked: Any) -> Generated:
        """Answer a request whole and alone; arguments as for :meth:`begin`."""
        return self._run(plan, options, **asked)

    def step(self) -> list[Decoding]:
        """Give every active request a token; returns those that ended, which are not active any more.

        A request ends by its length, an end token, a stop string, its ``cancel`` or an error of its own
        streamer. If the forward raises, all requests are as before the step.
        """
        going = [decoding for decoding in self._active if not decoding.end_if_cancelled()]
        if going:
            kvs = [decoding.kv for decoding in going if decoding.kv is not None]
            logits = decode(self._model, kvs, [decoding.token_ids[-1] for decoding in going])
            # A copy as generate makes it: processors write to their scores.
            chosen = [
                decoding.choose(row[None])
                for decoding, row in zip(going, logits.to(torch.float32, copy=True), strict=True)
            ]
            for decoding, token in zip(going, torch.cat(chosen).tolist(), strict=True):
                decoding.push(token)
        ended = [decoding for decoding in self._active if decoding.finished]
        self._active = [decoding for decoding in going if not decoding.finished]
        return ended

    def drop(self, decoding: Decoding) -> None:
        """End a request now; its tokens so far stay, as after a cancellation."""
        if decoding in self._active:
            self._active.remove(decoding)
            decoding.cancelled = True
            decoding.end()

    def clear(self) -> None:
        """Drop all requests."""
        for decoding in self.active:
            self.drop(decoding)

    @cached_property
    def _why_not_together(self) -> str | None:
        return why_not_together(self._model)

    @cached_property
    def _token_bytes(self) -> int:
        return KVLayout.of(self._model).token_bytes
