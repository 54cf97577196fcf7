"""Policies compared with a full prefill on questions: one engine per chunk encoder, around one model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from ragcachekit.commands.questions import OtherPrompts, Question, QuestionPrompt, Sample
from ragcachekit.config import StoreConfig
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.forward.prefill import LinkedPrompt
from ragcachekit.policies.base import PolicyAndEncoder
from ragcachekit.quality.compare import Comparison, Continuation, Reference, compare
from ragcachekit.reports import Answer, LinkReport
from ragcachekit.store.tiered import open_store
from ragcachekit.types import parse_encoder

FULL = PolicyAndEncoder("full", "none")
"""Reads no cache, and so has no encoder."""

_TRIES = 2


class Engines:
    """One :class:`RagCache` per encoder; one store, and one more per quantisation. Close it.

    Chunks of the encoder ``standalone+int8`` are rounded to eight bits at rest. ``neighbours`` are for the
    encoders ``similar:n``. ``average:n`` takes chunks of :class:`OtherPrompts`, so that no chunk is encoded
    after one of the prompt that is measured. ``stop`` are texts where an answer ends.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        encoders: Iterable[str],
        sample: Sample,
        *,
        stop: Sequence[str] = (),
        max_new_tokens: int = 64,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        encoders = list(encoders)
        self._model, self._stop = model, list(stop)
        self._options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        self._encoded: set[tuple[str, str, str]] = set()
        self._stores = {
            kind: open_store(StoreConfig(quantise={"host": kind} if kind else {}))
            for kind in dict.fromkeys(map(quantisation, encoders))
        }
        near = {"similar": sample.neighbours, "average": OtherPrompts(sample.questions)}
        self._engines = {
            name: RagCache(
                model,
                tokenizer,
                policy="reuse",
                encoder=name.partition("+")[0],
                neighbours=near.get(parse_encoder(name.partition("+")[0])[0]),
                store=self._stores[quantisation(name)],
                cold="now",
                cache_dir=cache_dir,
            )
            for name in encoders
        }

    @property
    def fingerprint(self) -> str:
        return next(iter(self._engines.values())).fingerprint

    def full(self, prompt: QuestionPrompt, *continuations: tuple[int, ...]) -> tuple[Answer, Reference]:
        """What a full prefill answers, and log probabilities along that and other ``continuations``."""
        answer, linked = self.answer(prompt, FULL), self._link(prompt, FULL)
        own = Continuation(self._model, linked.inputs)
        return answer, Reference.of(own, answer.token_ids, *continuations)

    def compare(
        self, question: Question, prompt: QuestionPrompt, way: PolicyAndEncoder, reference: Reference
    ) -> tuple[Comparison, LinkReport]:
        """Encode the chunks of a question, link its prompt, and compare with a full prefill.

        RagCacheError if chunk KV is not kept, or the prompt is computed in full.
        """
        if way != FULL:
            self._encode(question, prompt, way.encoder)
        linked = self._link(prompt, way)
        if linked.report.fallback:
            raise RagCacheError(
                f"{way} fell back to a full prefill ({linked.report.fallback}): nothing to measure"
            )
        return compare(Continuation(self._model, linked.inputs), reference), linked.report

    def answer(self, prompt: QuestionPrompt, way: PolicyAndEncoder, *, whole: bool = False) -> Answer:
        """A greedy answer from cached chunks; ``whole``: no text stops it."""
        return self._engine(way).generate(
            prompt.prompt, policy=way.policy, stop=None if whole else self._stop or None, **self._options
        )

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        for store in self._stores.values():
            store.close()

    def _encode(self, question: Question, prompt: QuestionPrompt, encoder: str) -> None:
        """Encode chunks one by one: in a batch the last digits would depend on the order of questions."""
        for text in question.chunks:
            if (encoder, prompt.before, text) not in self._encoded:
                self._engines[encoder].encode([text], system=prompt.before)
                self._encoded.add((encoder, prompt.before, text))

    def _link(self, prompt: QuestionPrompt, way: PolicyAndEncoder) -> LinkedPrompt:
        """Try again if something was missing: what was computed in place would be too good."""
        for _ in range(_TRIES):
            linked = self._engine(way).link(prompt.prompt, policy=way.policy)
            if all(use.source != "computed" for use in linked.report.uses):  # full asks for no chunk
                return linked
        raise RagCacheError(
            f"chunk KV for {way} is not kept: {linked.report}; the prompt may exceed the store's budget"
        )

    def _engine(self, way: PolicyAndEncoder) -> RagCache:
        return next(iter(self._engines.values())) if way == FULL else self._engines[way.encoder]


def quantisation(encoder: str) -> str:
    """``int8`` of ``standalone+int8``, else nothing."""
    return encoder.partition("+")[2]
