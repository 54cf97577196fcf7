"""Engines of the fidelity bench: one per chunk encoder, around one model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ragcachekit.commands.bench.fidelity.prompts import FidelityPrompt
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.config import QUANTISATIONS, StoreConfig
from ragcachekit.encode.neighbours import Neighbours
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.forward.linked_prompt import LinkedPrompt
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
class Prefilled:
    """Log probabilities after a prompt, float64, and its KV without the prompt's last token.

    ``log_probs`` are ``[continuations]`` of ``[1 + n, vocab]``: of the next token, and of that after each of
    the ``n`` tokens of a continuation. ``keys`` and ``values`` are ``[kv_heads, tokens - 1, head_dim]`` per
    layer.
    """

    log_probs: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


class Engines:
    """One :class:`RagCache` per encoder; one store, and one more per quantisation. Close it.

    ``stop`` are texts where an answer ends; ``neighbours`` are for the encoders ``similar:n``.
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
        encoders = list(encoders)
        self._stores = {
            kind: open_store(StoreConfig(quantise={"host": kind} if kind else {}))
            for kind in dict.fromkeys(map(quantisation, encoders))
        }
        self._stop = list(stop)
        self._options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        self._encoded: set[tuple[str, str, str]] = set()
        self._engines = {
            name: RagCache(
                model,
                tokenizer,
                policy="reuse",
                encoder=name.partition("+")[0],
                neighbours=neighbours if needs_neighbours(name) else None,
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
        engine = self._engine(way)
        linked = engine.link(prompt.prompt, policy=way.policy)
        if not _served(linked.report):
            raise RagCacheError(_NOT_KEPT.format(way=way, report=linked.report))
        return _prefilled(engine.model, linked, continuations), linked.report

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
        """Encode chunks one by one: in a batch the last digits would depend on the order of questions."""
        for chunk in question.chunks if way != FULL else ():
            if (way.encoder, prompt.before, chunk) not in self._encoded:
                self._engine(way).encode([chunk], system=prompt.before)
                self._encoded.add((way.encoder, prompt.before, chunk))

    def close(self) -> None:
        """Close engines and stores."""
        for engine in self._engines.values():
            engine.close()
        for store in self._stores.values():
            store.close()

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
    return encoder.partition(":")[0] == "similar"


@torch.no_grad()
def _prefilled(model: Any, linked: LinkedPrompt, continuations: Sequence[Sequence[int]]) -> Prefilled:
    inputs = linked.inputs
    ids, mask, cache = inputs["input_ids"], inputs["attention_mask"], inputs.get("past_key_values")
    if cache is None:  # nothing was reused
        # Not the model's own kind of cache, which drops keys of sliding layers.
        cache = DynamicCache()
        model.base_model(
            input_ids=ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache, use_cache=True
        )
    kv = [(layer.keys, layer.values) for layer in cache.layers]
    log_probs, length = [], ids.shape[1]
    for tokens in continuations:
        for layer, (keys, values) in zip(cache.layers, kv, strict=True):
            layer.keys, layer.values = keys, values  # without the continuation before
        rows = torch.tensor([[int(ids[0, -1]), *tokens]], device=ids.device)
        output = model(
            input_ids=rows,
            attention_mask=mask.new_ones(1, length + len(tokens)),
            position_ids=torch.arange(length - 1, length + len(tokens), device=ids.device)[None],
            past_key_values=cache,
            use_cache=True,
        )
        log_probs.append(output.logits[0].double().log_softmax(-1))
    return Prefilled(tuple(log_probs), tuple(k[0] for k, _ in kv), tuple(v[0] for _, v in kv))
