"""Scores of answers, compared as in SQuAD: lower case, without punctuation and articles."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from rouge_score import rouge_scorer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = re.compile(r"[^\w\s]")
_WORD = re.compile(r"\w+")


class _Words:
    """Words of any script; rouge-score's own tokenizer is for ASCII."""

    def tokenize(self, text: str) -> list[str]:
        return _WORD.findall(text.lower())


_ROUGE = rouge_scorer.RougeScorer(["rougeL"], tokenizer=_Words())


def words(text: str) -> list[str]:
    """Words without articles and punctuation."""
    return _ARTICLES.sub(" ", _PUNCTUATION.sub("", text.lower())).split()


def exact_match(answer: str, right: str) -> float:
    """1 if the same words stand in the same order, else 0."""
    return float(words(answer) == words(right))


def token_f1(answer: str, right: str) -> float:
    """Harmonic mean of precision and recall of words, as a bag; two empty texts agree."""
    one, other = words(answer), words(right)
    if not one or not other:
        return float(one == other)
    common = sum((Counter(one) & Counter(other)).values())
    return 2 * common / (len(one) + len(other))


def rouge_l(answer: str, right: str) -> float:
    """ROUGE-L F measure (package rouge-score, no stemming); two texts without words agree."""
    if not _WORD.search(answer) and not _WORD.search(right):
        return 1.0
    return float(_ROUGE.score(right, answer)["rougeL"].fmeasure)


def jaccard(answer: str, other: str) -> float:
    """Shared words / all words, as sets (Cache-Craft, section 5); two empty texts agree."""
    one, two = set(words(answer)), set(words(other))
    return len(one & two) / len(one | two) if one or two else 1.0


def divergence(full: torch.Tensor, other: torch.Tensor) -> float:
    """KL(full || other) in nats of next-token distributions, given as log probabilities ``[..., vocab]``.

    The mean over all but the last dimension.
    """
    return max(0.0, float((full.exp() * (full - other)).nan_to_num(0.0).sum(-1).mean()))


def loss_per_token(log_probs: torch.Tensor, tokens: Sequence[int]) -> float:
    """Mean negative log likelihood of ``tokens`` in nats; 0 of none.

    ``log_probs`` are ``[at least len(tokens), vocab]``.
    """
    rows = torch.arange(len(tokens))
    return -float(log_probs[rows, torch.tensor(tokens)].mean()) if tokens else 0.0


def relative_deviations(
    full: Iterable[torch.Tensor], other: Iterable[torch.Tensor], spans: Sequence[range]
) -> tuple[float, ...]:
    """Per layer ``||other - full|| / ||full||`` over the rows of ``spans``.

    ``full`` and ``other`` hold ``[heads, tokens, head_dim]`` per layer.
    """
    return tuple(
        float(gap.norm() / right.norm()) if right.any() else 0.0
        for gap, right in _row_norms(full, other, spans)
    )


def attention_deviation(
    attention: Iterable[torch.Tensor],
    full: Iterable[torch.Tensor],
    other: Iterable[torch.Tensor],
    spans: Sequence[range],
) -> float:
    """Mean over layers of sum a * ||other - full|| / sum a * ||full||, over the rows of ``spans``.

    Norms are those of rows, over all heads; ``attention`` holds the weights a, ``[tokens]`` per layer.
    ``full`` and ``other`` are values as for :func:`relative_deviations`.
    """
    rows, out = _rows(spans), []
    for weights, (gap, right) in zip(attention, _row_norms(full, other, spans), strict=True):
        inside = weights[rows[: len(gap)].to(weights.device)].double()
        whole = float(inside @ right)
        out.append(float(inside @ gap) / whole if whole else 0.0)
    return sum(out) / len(out)


def _rows(spans: Sequence[range]) -> torch.Tensor:
    return torch.tensor([p for span in spans for p in span], dtype=torch.long)


def _row_norms(
    full: Iterable[torch.Tensor], other: Iterable[torch.Tensor], spans: Sequence[range]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer ``[rows]`` of ``other - full`` and of ``full``, norms over heads and dimensions, float64."""
    rows = _rows(spans)
    for one, two in zip(full, other, strict=True):
        at = rows[rows < one.shape[1]].to(one.device)
        right = one[:, at].double()
        gap = two[:, at].double() - right
        yield gap.norm(dim=(0, 2)), right.norm(dim=(0, 2))
