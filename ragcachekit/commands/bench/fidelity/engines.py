"""Engines of the fidelity bench: one per chunk encoder, around one model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ragcachekit.commands.bench.fidelity.continued import ROWS, ContinuedPrompt, Prefilled, is_plainly_greedy
from ragcachekit.commands.bench.fidelity.prompts import FidelityPrompt
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.config import QUANTISATIONS, StoreConfig
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.forward.linked_prompt import LinkedPrompt
from ragcachekit.generate.detokenizer import cut_at_stop
from ragcachekit.generate.options import end_tokens
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.plan.encodings import DEFAULT_NEIGHBOURS
from ragcachekit.plan.neighbours import Neighbours, PrecedingChunks
from ragcachekit.prompt.tokenizer import PromptTokenizer
from ragcachekit.reports import Answer, LinkReport
from ragcachekit.store.factory import open_store

NO_ENCODER = "none"


@dataclass(frozen=True)
class Way:
    """A policy over chunks of one encoder; ``full`` has the encoder ``none``: it reads no cache.

    ``standalone+int8``: over chunks that were rounded to eight bits at rest.
    """

    policy: str
    encoder: str

    def __str__(self) -> str:
        return f"{self.policy} on {self.encoder}"


FULL = Way("full", NO_ENCODER)
REUSE = Way("reuse", "system")
BASELINES = (FULL, REUSE)
"""Always measured: FusionRAG's normalized F1 is relative to them."""

ALONE = Way("reuse", "standalone")
"""Measured with a dataset: recovery is relative to ``full`` and to this way."""

_TRIES = 2
_NOT_KEPT = "chunk KV for {way} is not kept: {report}; the prompt may be larger than the store's budget"


@dataclass(frozen=True, eq=False)
class Compared:
    """A greedy answer in one way, with what the same linked prompt says of two given answers."""

    text: str
    token_ids: tuple[int, ...]
    prefilled: Prefilled
    report: LinkReport


class Engines:
    """One :class:`RagCache` per encoder; one store, and one more per quantisation. Close it.

    ``stop`` are texts where an answer ends; ``neighbours`` are for the encoders ``similar:n`` and
    ``average:n``, which takes the chunks beside a chunk where they are of documents.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        encoders: Iterable[str],
        *,
        stop: Sequence[str] = (),
        max_new_tokens: int = 64,
        neighbours: Neighbours | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        encoders, rope = list(encoders), describe_rope(model)
        self._model, self._decode = model, PromptTokenizer(tokenizer).decode
        self._stores = {
            kind: open_store(StoreConfig(quantise={"host": kind} if kind else {}))
            for kind in dict.fromkeys(map(quantisation, encoders))
        }
        self._stop = list(stop)
        self._options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        self._ends = end_tokens(self._options, model.generation_config)
        # Where frequencies change with the length, generate drops the cache and begins again.
        self._plainly_greedy = is_plainly_greedy(model.generation_config) and not rope.depends_on_length
        self._encoded: set[tuple[str, str, str]] = set()
        self._engines = {
            name: RagCache(
                model,
                tokenizer,
                policy="reuse",
                encoder=name.partition("+")[0],
                neighbours=_neighbours(name, neighbours),
                store=self._stores[quantisation(name)],
                cold="now",
                cache_dir=cache_dir,
            )
            for name in encoders
        }

    @property
    def fingerprint(self) -> str:
        """Of the model."""
        return next(iter(self._engines.values())).fingerprint

    def prefilled(
        self, prompt: FidelityPrompt, way: Way, continuations: Sequence[Sequence[int]] = ((),)
    ) -> tuple[Prefilled, LinkReport]:
        """Link a prompt whose chunks are cached and run its last token, then each continuation.

        RagCacheError as :meth:`answer`.
        """
        linked = self._linked(prompt, way)
        asking = range(max(prompt.spans[-1].stop, len(prompt.token_ids) - ROWS), len(prompt.token_ids))
        run = ContinuedPrompt(self._model, linked, asking)
        return run.prefilled(map(run.logits, continuations)), linked.report

    def compared(
        self, prompt: FidelityPrompt, way: Way, answer: Sequence[int], gold: Sequence[int]
    ) -> Compared:
        """Link once: the answer of :meth:`answer`, and log probabilities along ``answer`` and ``gold``.

        Where the greedy answer begins as ``answer`` (full's), its tokens come from one forward. In half
        precision a tie between two tokens may end otherwise than in :meth:`answer`. RagCacheError as there.
        """
        linked = self._linked(prompt, way)
        run = ContinuedPrompt(self._model, linked)
        logits = run.logits(answer)
        if self._plainly_greedy:
            ids = run.greedy(logits, answer, self._is_over)
            text = cut_at_stop(self._decode(ids), self._stop)[0]
        else:
            generated = self.answer(prompt, way)
            text, ids = generated.text, generated.token_ids
        return Compared(text, ids, run.prefilled((logits, run.logits(gold))), linked.report)

    def answer(self, prompt: FidelityPrompt, way: Way) -> Answer:
        """Generate greedily from cached chunks.

        A second try follows when something was missing: what was computed in place would be too good.
        RagCacheError if chunk KV is not kept.
        """
        for _ in range(_TRIES):
            answer = self._engine(way).generate(
                prompt.prompt, policy=way.policy, stop=self._stop or None, **self._options
            )
            if _served(answer.report.link):
                return answer
        raise RagCacheError(_NOT_KEPT.format(way=way, report=answer.report.link))

    def token_ids(self, prompt: FidelityPrompt) -> tuple[int, ...]:
        """What ``full`` generates when no text stops it."""
        return self._engine(FULL).generate(prompt.prompt, policy=FULL.policy, **self._options).token_ids

    def encode(self, question: FidelityQuestion, prompt: FidelityPrompt, way: Way) -> None:
        """Encode chunks one by one: in a batch the last digits would depend on the order of questions.

        For ``average:n`` the document is encoded as a whole: its chunks share forwards.
        """
        chunks = question.chunks if way != FULL else ()
        if new := [text for text in chunks if (way.encoder, prompt.before, text) not in self._encoded]:
            together = (question.document or chunks) if averages(way.encoder) else ()
            for texts in [list(together)] if together else [[text] for text in new]:
                self._engine(way).encode(texts, system=prompt.before)
                self._encoded.update((way.encoder, prompt.before, text) for text in texts)

    def close(self) -> None:
        """Close engines and stores."""
        for engine in self._engines.values():
            engine.close()
        for store in self._stores.values():
            store.close()

    def _linked(self, prompt: FidelityPrompt, way: Way) -> LinkedPrompt:
        for _ in range(_TRIES):
            linked = self._engine(way).link(prompt.prompt, policy=way.policy)
            if _served(linked.report):
                return linked
        raise RagCacheError(_NOT_KEPT.format(way=way, report=linked.report))

    def _is_over(self, tokens: Sequence[int]) -> bool:
        return (
            len(tokens) == self._options["max_new_tokens"]
            or tokens[-1] in self._ends
            or cut_at_stop(self._decode(tokens), self._stop)[1]
        )

    def _engine(self, way: Way) -> RagCache:
        if way.encoder == NO_ENCODER:
            return next(iter(self._engines.values()))
        return self._engines[way.encoder]


def _served(report: LinkReport) -> bool:
    """Whether every chunk, and the prefix, came from the store (``full`` asks for none)."""
    return all(use.source != "computed" for use in report.uses)


def quantisation(encoder: str) -> str:
    """``int8`` of ``standalone+int8``, else nothing; ValueError for an unknown quantisation."""
    _, rounded, kind = encoder.partition("+")
    if rounded and kind not in QUANTISATIONS:
        raise ValueError(f"encoder {encoder!r}: unknown rounding {kind!r}; known: {', '.join(QUANTISATIONS)}")
    return kind


def needs_neighbours(encoder: str) -> bool:
    """Whether an encoder looks for similar chunks."""
    return encoder.partition(":")[0] in DEFAULT_NEIGHBOURS


def _neighbours(encoder: str, source: Neighbours | None) -> Neighbours | None:
    """What an encoder takes of a source; a mean over contexts takes the chunks encoded together instead."""
    if not needs_neighbours(encoder) or (averages(encoder) and isinstance(source, PrecedingChunks)):
        return None
    return source


def averages(encoder: str) -> bool:
    """Whether an encoder takes the mean over contexts."""
    return encoder.startswith("average")
