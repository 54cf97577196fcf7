"""Requests decoded together: each is prefilled by generate, then gets one token per forward."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from ragcachekit.forward.decode import RequestKV, decode
from ragcachekit.forward.rows import MAX_HELD_BYTES, OwnRows
from ragcachekit.generate.options import effective, end_tokens, uses_beams
from ragcachekit.generate.run import DecodingLoop, Generated, StopStrings, run_generate
from ragcachekit.model.kv import KVLayout
from ragcachekit.model.rope import Rope
from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.prompt.tokenizer import common_length

log = logging.getLogger(__name__)

_OF_GENERATE = {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer", "tokenizer"}
_OF_GENERATE |= {"generation_config", "seed"}


class Decoding:
    """A request that is decoded in a batch, or ended; ``token_ids`` are its new tokens so far.

    ``error`` is what its sampling, streamer or criterion raised; :meth:`generated` raises it.
    """

    def __init__(
        self, prefilled: Generated, ends: frozenset[int], streamer: Any, cancel: threading.Event | None
    ) -> None:
        self.plan, self.token_ids = prefilled.plan, list(prefilled.token_ids)
        self.kv: RequestKV | None = None
        self.finished, self.cancelled = False, prefilled.cancelled
        self.error: BaseException | None = None
        self._prefilled, self._ends, self._streamer, self._cancel = prefilled, ends, streamer, cancel
        self.max_new_tokens = 0
        if prefilled.loop is not None:
            self._choose_by(prefilled.loop)
        if self._is_done():
            self.end()

    def _choose_by(self, loop: DecodingLoop) -> None:
        """Use a request's own processors and criteria, over its own ids ``[1, tokens]``."""
        self._loop, prompt = loop, len(self.plan.token_ids)
        self.max_new_tokens = loop.config.max_length - prompt
        self._processors = list(loop.processors)
        here = (MaxLengthCriteria, EosTokenCriteria, StopStrings)  # which need no ids on the device
        self._stops = [one for one in loop.criteria if isinstance(one, StopStrings)]
        self._criteria = StoppingCriteriaList(one for one in loop.criteria if not isinstance(one, here))
        self._ids: Tensor | None = None
        if self._processors or self._criteria:
            device = self._prefilled.cache.layers[0].keys.device
            self._ids = torch.empty((1, prompt + self.max_new_tokens), dtype=torch.long, device=device)
            known = (*self.plan.token_ids, *self.token_ids)
            self._ids[0, : len(known)] = torch.tensor(known)

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and the longest possible answer."""
        return len(self.plan.token_ids) + self.max_new_tokens

    @property
    def own(self) -> OwnRows | None:
        """What was observed of entries that the prefill computed."""
        return self._prefilled.own

    def hold_kv(self) -> None:
        """Move the prompt's KV from its cache to buffers with room; let go of the entries that it reused."""
        rest = self.max_new_tokens - len(self.token_ids)
        self.kv = RequestKV(self._prefilled.cache, len(self.plan.token_ids), rest)
        self.plan = self.plan.without_kv()
        self._prefilled = replace(self._prefilled, cache=None, plan=self.plan, loop=None)

    def choose(self, logits: Tensor) -> Tensor:
        """The next token ``[1]``, out of ``logits`` ``[1, vocab]`` in float32."""
        try:
            scores: Tensor = LogitsProcessorList(self._processors)(self._so_far(), logits)
            if self._loop.config.do_sample:
                chances = scores.softmax(-1)
                return torch.multinomial(chances, 1, generator=self._loop.generator)[0]
            return scores.argmax(-1)
        except BaseException as error:  # its processor's, or NaN among the logits
            self.error = error
            return logits.argmax(-1)

    def push(self, token: int) -> None:
        """Add a token; the request ends with it or goes on."""
        try:
            if self.error is not None:
                raise self.error
            self.token_ids.append(token)
            if self._ids is not None:
                self._ids[0, len(self.plan.token_ids) + len(self.token_ids) - 1] = token
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

    def _so_far(self) -> Tensor | None:
        rows = len(self.plan.token_ids) + len(self.token_ids)
        return None if self._ids is None else self._ids[:, :rows]

    @property
    def _at_end(self) -> bool:
        return bool(self.token_ids) and self.token_ids[-1] in self._ends

    def _is_done(self) -> bool:
        if self._cancel is not None and self._cancel.is_set():
            self.cancelled = True
        return (
            self.cancelled
            or self._at_end
            or len(self.token_ids) >= self.max_new_tokens
            or any(stop.end(self.token_ids) for stop in self._stops)
            or bool(self._criteria and self._criteria(self._so_far(), None).all())
        )


class BatchDecoder:
    """Decodes several linked prompts with one forward per token.

    A new request joins between two forwards. Each attends over buffers of its own, so none is padded to
    another's length, and chooses its tokens by its own logits processors. Not thread-safe: one thread uses
    it. Forwards of other threads on the model may run at the same time. The model has our attention.

    At most ``max_batch`` requests are decoded together, with at most ``max_bytes`` of KV of their prompts and
    longest answers (default: a tenth of a GPU's free memory, else 2 GiB); a request alone may exceed it.
    ``alone`` is why no request of this model may join another, if so.
    """

    def __init__(
        self,
        model: Any,
        rope: Rope,
        *,
        decode: Callable[[Sequence[int]], str],
        max_batch: int,
        max_bytes: int | None = None,
        alone: str | None = None,
    ) -> None:
        self._model, self._rope, self._alone = model, rope, alone
        self.run = partial(run_generate, model, rope, decode=decode)
        if max_bytes is None:
            on_gpu = model.device.type == "cuda"
            max_bytes = torch.cuda.mem_get_info(model.device)[0] // 10 if on_gpu else 2 << 30
        self._max_batch, self._max_bytes = max_batch, max_bytes
        self._active: list[Decoding] = []

    @property
    def active(self) -> Sequence[Decoding]:
        """The requests that the next step gives a token each."""
        return tuple(self._active)

    def why_alone(self, options: Mapping[str, Any], rows: int = 0) -> str | None:
        """Why a request with these options of generate has to :meth:`run` alone, or None.

        ``rows`` are those of its prompt and longest answer.
        """
        defaults = self._model.generation_config
        if self._rope.depends_on_length:
            return "rotary frequencies that depend on the length are not decoded in a batch"
        if rows > self._rope.exact_up_to:
            return f"attention by position, after {self._rope.exact_up_to} tokens, is not decoded in a batch"
        if uses_beams(options, defaults):
            return "num_beams is not decoded in a batch"
        known = vars(GenerationConfig()).keys() | vars(defaults).keys() | _OF_GENERATE
        of_forward = [name for name, value in options.items() if name not in known and value is not None]
        healed = ["token_healing"] if effective(options, defaults, "token_healing") else []
        for name in (*of_forward, *healed):
            return f"{name} is not decoded in a batch"
        return self._alone

    def has_room(self, tokens: int) -> bool:
        """Whether a request of so many tokens, prompt and longest answer, may begin."""
        if not self._active:
            return True
        kvs = [(decoding.kv, min(decoding.tokens, self._rope.context)) for decoding in self._active]
        shared = {id(part): part.rows for kv, _ in kvs if kv for part in kv.shared}
        held = sum(rows - (kv.start if kv else 0) for kv, rows in kvs) + sum(shared.values())
        fits = (held + tokens) * self._token_bytes <= self._max_bytes
        return fits and len(self._active) < self._max_batch

    def begin(self, plan: LinkPlan, options: Mapping[str, Any], **how: Any) -> Decoding:
        """Prefill a request and choose its first token; it is active unless it ended with that.

        ``how`` are further arguments of :func:`~ragcachekit.generate.run.run_generate`, whose errors are
        raised. Only for options that :meth:`why_alone` has nothing against.
        """
        prefilled = self.run(plan, options, one_token=True, **how)
        ends = end_tokens(options, self._model.generation_config)
        decoding = Decoding(prefilled, ends, options.get("streamer"), how.get("cancel"))
        if not decoding.finished:
            decoding.hold_kv()
            self._share(decoding)
            self._active.append(decoding)
            if decoding.own and sum(one.own.nbytes for one in self._active if one.own) > MAX_HELD_BYTES:
                decoding.own.settle()
        return decoding

    def step(self) -> list[Decoding]:
        """Give every active request a token; returns those that ended, which are not active any more.

        A request ends by its length, an end token, a criterion, its ``cancel`` or an error of its own code.
        If the forward raises, all requests are as before the step.
        """
        going = [decoding for decoding in self._active if not decoding.end_if_cancelled()]
        if going:
            kvs = [decoding.kv for decoding in going if decoding.kv is not None]
            tokens = [decoding.token_ids[-1] for decoding in going]
            try:
                logits = decode(self._model, kvs, tokens)
            except Exception:  # each goes on from the KV that it has (RAGCache section 6)
                log.warning("a decoding step failed, and is tried once more", exc_info=True)
                logits = decode(self._model, kvs, tokens)
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

    def _share(self, new: Decoding) -> None:
        """Have a request hold what it has in common with the active one that begins most like it."""
        ids = new.plan.token_ids
        common = {one: common_length(one.plan.token_ids, ids) for one in self._active}
        best = max(common, key=lambda one: common[one], default=None)
        if best and best.kv and new.kv and self._model.device.type == "cpu":
            new.kv.share(best.kv, common[best], [one.kv for one in self._active if one.kv])

    @cached_property
    def _token_bytes(self) -> int:
        return KVLayout.of(self._model).token_bytes
