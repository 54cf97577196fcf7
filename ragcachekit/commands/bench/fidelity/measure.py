"""One question, one policy, one encoder: the answer, the first token's distribution, the KV."""

from __future__ import annotations

from dataclasses import dataclass

from ragcachekit.commands.bench.fidelity import metrics
from ragcachekit.commands.bench.fidelity.engines import FULL, Engines, Prefilled, Way
from ragcachekit.commands.bench.fidelity.prompts import FidelityPrompt
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.errors import RagCacheError


@dataclass(frozen=True)
class Measurement:
    """What one question gave in one way; plain values only.

    ``exact_match``, ``f1`` and ``rouge_l`` are against the right answer, ``agreement...`` against that of
    ``full``; ``kl`` is KL(full || this way) of the first token, in nats; deviations are per layer, relative
    to ``full``, over the chunks' rows; ``ratio_spent`` is recomputed / cached rows over all layers.
    """

    text: str
    exact_match: float
    f1: float
    rouge_l: float
    agreement: float
    agreement_rouge_l: float
    agreement_jaccard: float
    answer_tokens: int
    kl: float
    key_deviation: tuple[float, ...]
    value_deviation: tuple[float, ...]
    ratio_spent: float
    prompt_tokens: int
    recomputed_tokens: int
    reused_tokens: int


def measure(
    engines: Engines,
    question: FidelityQuestion,
    prompt: FidelityPrompt,
    way: Way,
    full: Prefilled,
    full_text: str | None,
) -> Measurement:
    """Answer a question in one way and compare; ``full_text`` None: this is the answer of ``full``."""
    engines.encode(question, prompt, way)
    answer = engines.answer(prompt, way)
    found, report = (full, answer.report.link) if way == FULL else engines.prefilled(prompt, way)
    if report.fallback or answer.report.link.fallback:
        raise RagCacheError(f"{way} fell back to a full prefill ({report.fallback}): nothing to measure")
    text, other = answer.text.strip(), full_text if full_text is not None else answer.text.strip()
    return Measurement(
        text=text,
        exact_match=metrics.exact_match(text, question.answer),
        f1=metrics.token_f1(text, question.answer),
        rouge_l=metrics.rouge_l(text, question.answer),
        agreement=float(text == other),
        agreement_rouge_l=metrics.rouge_l(text, other),
        agreement_jaccard=metrics.jaccard(text, other),
        answer_tokens=len(answer.token_ids),
        kl=metrics.divergence(full.log_probs, found.log_probs),
        key_deviation=metrics.relative_deviations(full.keys, found.keys, prompt.spans),
        value_deviation=metrics.relative_deviations(full.values, found.values, prompt.spans),
        ratio_spent=answer.report.link.recompute_ratio,
        prompt_tokens=answer.report.link.prompt_tokens,
        recomputed_tokens=answer.report.link.recomputed_tokens,
        reused_tokens=answer.report.link.reused_tokens,
    )
