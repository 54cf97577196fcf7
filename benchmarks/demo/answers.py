"""Every question answered twice, in full and with both caches, and how far the answers are apart."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from langchain_core.runnables import Runnable

from benchmarks.demo.chain import Asked, ask, messages
from benchmarks.demo.corpus import Question
from ragcachekit.commands.questions import bare_ids
from ragcachekit.commands.report import Bootstrap
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.quality.compare import divergence, loss_per_token, word_f1

PART = "answer"
MEANS = ("f1", "kl", "full_loss", "cached_loss")
SHARES = ("full_right", "cached_right", "same")


@dataclass(frozen=True)
class Answered:
    """One question; plain values.

    ``full`` and ``cached`` are answers, ``chunks`` and ``cached_chunks`` what was retrieved for them. ``kl``
    is KL(full || cached) of the first token in nats. ``full_loss`` and ``cached_loss`` are nats per token of
    full's answer, after full's prompt in full and after the cached prompt.
    """

    question: str
    known: str
    full: str
    cached: str
    full_right: bool
    cached_right: bool
    same: bool
    f1: float
    kl: float
    full_loss: float
    cached_loss: float
    chunks: tuple[int, ...]
    cached_chunks: tuple[int, ...]
    prompt_tokens: int
    reused_tokens: int
    recompute_ratio: float
    policy: str
    encoder: str


class Answering:
    """Answers questions with one engine, and with ``own``, a copy of its model that the library never saw."""

    def __init__(self, rag: RagCache, own: Any, max_tokens: int) -> None:
        self._rag, self._own = rag, own
        self._options: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": False}

    def answered(
        self, question: Question, chunks: Sequence[int], texts: Sequence[str], chain: Runnable[str, str]
    ) -> Answered:
        """Answer from ``chunks``, places among ``texts``, in full, then through ``chain`` with both caches.

        RagCacheError if ``full`` through the library is not what the model's own ``generate`` gives, or a
        prompt whose chunks were encoded is not served from the cache.
        """
        prompt = messages([texts[place] for place in chunks], question.text)
        tokens, log_probs = self._generated(prompt)
        full = self._rag.generate(prompt, policy="full", **self._options)
        if full.token_ids != tokens:
            raise RagCacheError(
                f"full through the library differs from the model's own generate on {question.text!r}; "
                "do not trust any figure"
            )
        cached = ask(chain, question.text)
        found = self._log_probs(cached, tokens)
        link = cached.report["link"]
        return Answered(
            question=question.text,
            known=question.answer,
            full=full.text.strip(),
            cached=cached.answer.strip(),
            full_right=contains(full.text, question.answer),
            cached_right=contains(cached.answer, question.answer),
            same=full.text == cached.answer,
            f1=word_f1(cached.answer, full.text),
            kl=divergence(log_probs[0], found[0]),
            full_loss=loss_per_token(log_probs, tokens),
            cached_loss=loss_per_token(found, tokens),
            chunks=tuple(chunks),
            cached_chunks=cached.chunks,
            prompt_tokens=link["prompt_tokens"],
            reused_tokens=link["exact_tokens"] + link["approximate_tokens"],
            recompute_ratio=link["recompute_ratio"],
            policy=link["policy"],
            encoder=link["encoder"],
        )

    @torch.no_grad()
    def _generated(self, prompt: list[dict[str, Any]]) -> tuple[tuple[int, ...], torch.Tensor]:
        """Tokens of the model's own ``generate``, and their float64 log probabilities ``[tokens, vocab]``."""
        ids = torch.tensor([bare_ids(self._rag.tokenizer, prompt)])
        output = self._own.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            output_logits=True,
            return_dict_in_generate=True,
            **self._options,
        )
        logits = torch.cat(output.logits).double().log_softmax(-1)
        return tuple(output.sequences[0, ids.shape[1] :].tolist()), logits

    @torch.no_grad()
    def _log_probs(self, cached: Asked, tokens: Sequence[int]) -> torch.Tensor:
        """Log probabilities ``[1 + tokens, vocab]`` after the cached prompt and after each of ``tokens``."""
        linked = self._rag.link(list(cached.messages))
        if any(use.source == "computed" for use in linked.report.uses) or linked.report.fallback:
            raise RagCacheError(f"a prompt was not served from the cache: {linked.report}")
        inputs = linked.inputs
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        length = ids.shape[1]
        output = self._rag.model(
            input_ids=torch.tensor([[int(ids[0, -1]), *tokens]]),
            attention_mask=mask.new_ones(1, length + len(tokens)),
            position_ids=torch.arange(length - 1, length + len(tokens))[None],
            past_key_values=inputs["past_key_values"],
            use_cache=True,
        )
        found: torch.Tensor = output.logits[0].double().log_softmax(-1)
        return found


def contains(answer: str, known: str) -> bool:
    """Whether ``answer`` has the known answer as whole words, in any case and with any blanks."""
    wanted = r"\s+".join(map(re.escape, known.lower().split()))
    return re.search(rf"(?<!\w){wanted}(?!\w)", answer.lower()) is not None


def quality(answered: Sequence[Answered], seed: int) -> dict[str, Any]:
    """One row: means with bootstrap intervals, counts with Wilson's, and the share of tokens reused."""
    bootstrap, n = Bootstrap(len(answered), seed), len(answered)
    found: dict[str, Any] = {"part": "quality", "n": n}
    columns = {name: [getattr(one, name) for one in answered] for name in MEANS}
    columns["loss_added"] = [one.cached_loss - one.full_loss for one in answered]
    for name, values in columns.items():
        low, high = bootstrap.of_mean(values)
        found |= {name: sum(values) / n, f"{name}_low": low, f"{name}_high": high}
    for name in SHARES:
        right = sum(getattr(one, name) for one in answered)
        low, high = wilson(right, n)
        found |= {name: right, f"{name}_low": low, f"{name}_high": high}
    return {
        **found,
        "other_chunks": sum(one.chunks != one.cached_chunks for one in answered),
        "tokens_reused": sum(one.reused_tokens for one in answered)
        / sum(one.prompt_tokens for one in answered),
        "recompute_ratio": sum(one.recompute_ratio for one in answered) / n,
        "policy": answered[0].policy,
        "encoder": answered[0].encoder,
    }


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of ``right`` out of ``n``."""
    share = right / n
    middle = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)
