"""Every question answered twice, in full and with both caches, and how far the answers are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from langchain_core.runnables import Runnable
from tqdm.auto import tqdm

from benchmarks.demo.chain import Asked, ask, messages
from benchmarks.demo.questions import Question
from benchmarks.demo.score import PART, Answered, contains
from benchmarks.demo.work import Work
from ragcachekit.commands.reading_prompt import bare_ids
from ragcachekit.commands.text_scores import word_f1
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.quality.compare import divergence, loss_per_token


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


def answer(
    answering: Answering,
    asked: Sequence[Question],
    chunks: Mapping[str, Sequence[int]],
    texts: Sequence[str],
    chain: Runnable[str, str],
    work: Work,
    progress: bool,
) -> None:
    """Answer these questions; ``chunks`` are those that each one finds without a cache."""
    for question in tqdm(asked, "answers", unit="question", disable=not progress):
        found = answering.answered(question, chunks[question.text], texts, chain)
        work.put(PART, question.text, asdict(found))
