"""How far a linked prompt is from a full prefill: the one measure of quality.

``auto``, shadow mode, quality budgets, ``calibrate`` and ``bench fidelity`` all use it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers.cache_utils import DynamicCache

from ragcachekit.generate.options import end_tokens
from ragcachekit.model.kv import decoder_of
from ragcachekit.types import Ids

ANSWER_TOKENS = 8
"""Tokens that the full prefill generates, and a candidate or a shadowed prompt is measured on."""


def divergence(full: torch.Tensor, other: torch.Tensor) -> float:
    """KL(full || other) in nats of next-token distributions, given as log probabilities ``[..., vocab]``.

    The mean over all but the last dimension. A token that ``full`` rules out adds nothing.
    """
    terms = torch.where(full.isneginf(), 0.0, full.exp() * (full - other))
    return max(0.0, float(terms.sum(-1).mean()))


def loss_per_token(log_probs: torch.Tensor, tokens: Sequence[int]) -> float:
    """Mean negative log likelihood of ``tokens`` in nats, 0 without any.

    ``log_probs`` are ``[at least len(tokens), vocab]``.
    """
    rows = torch.arange(len(tokens))
    return -float(log_probs[rows, torch.tensor(tokens)].mean()) if tokens else 0.0


def bag_f1(one: Sequence[object], other: Sequence[object]) -> float:
    """Harmonic mean of precision and recall of tokens or words, as bags; two empty ones agree."""
    if not one or not other:
        return float(len(one) == len(other))
    common = (Counter(one) & Counter(other)).total()
    return 2 * common / (len(one) + len(other))


def words(text: str) -> list[str]:
    """Words of any script as SQuAD compares them: lower case, without punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", re.sub(r"[^\w\s]", "", text.lower())).split()


def exact_match(answer: str, right: str) -> float:
    """1 if it is the same words in the same order, else 0."""
    return float(words(answer) == words(right))


def word_f1(answer: str, right: str) -> float:
    """F1 of words, as bags."""
    return bag_f1(words(answer), words(right))


class Continuation:
    """A prompt that is continued in several ways, each from its last token on.

    ``inputs`` are those of a :class:`~ragcachekit.forward.prefill.LinkedPrompt`, or the ``input_ids``
    ``[1, tokens]`` alone, which are then prefilled. ``before_forward`` is called before every forward.
    """

    def __init__(
        self, model: Any, inputs: Mapping[str, Any], before_forward: Callable[[], object] = lambda: None
    ) -> None:
        ids, cache = inputs["input_ids"], inputs.get("past_key_values")
        self._model, self._before_forward = model, before_forward
        self._last, self._prompt_rows = int(ids[0, -1]), ids.shape[1] - 1
        if cache is None:
            # Not the model's own kind of cache, which drops keys of sliding layers.
            cache = DynamicCache()
            before_forward()
            with torch.no_grad():
                decoder_of(model)(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)
        self._cache, self._rows = cache, self._prompt_rows

    def log_probs(self, tokens: Sequence[int]) -> torch.Tensor:
        """After the prompt and after each of ``tokens``: ``[1 + len(tokens), vocab]``, float64."""
        for layer in self._cache.layers:
            layer.keys = layer.keys[:, :, : self._prompt_rows]
            layer.values = layer.values[:, :, : self._prompt_rows]
        self._rows = self._prompt_rows
        return self._run([self._last, *tokens])

    def greedy(self, limit: int, ends: Collection[int]) -> tuple[Ids, torch.Tensor]:
        """A greedy answer of at most ``limit`` tokens, up to one of ``ends``, and what each was chosen by.

        Those are log probabilities ``[tokens, vocab]``.
        """
        rows = [self.log_probs(())[0]]
        answer = [int(rows[0].argmax())]
        while len(answer) < limit and answer[-1] not in ends:
            rows.append(self._run(answer[-1:])[0])
            answer.append(int(rows[-1].argmax()))
        return tuple(answer), torch.stack(rows)

    @torch.no_grad()
    def _run(self, tokens: Sequence[int]) -> torch.Tensor:
        self._before_forward()
        device, start, stop = self._model.device, self._rows, self._rows + len(tokens)
        output = self._model(
            input_ids=torch.tensor([list(tokens)], device=device),
            attention_mask=torch.ones(1, stop, dtype=torch.long, device=device),
            position_ids=torch.arange(start, stop, device=device)[None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._rows = stop
        log_probs: torch.Tensor = output.logits[0].double().log_softmax(-1)
        return log_probs


@dataclass(frozen=True, eq=False)
class Reference:
    """What a full prefill makes of some continuations of a prompt, its own answer first.

    ``log_probs`` are ``[1 + tokens, vocab]`` per continuation.
    """

    continuations: tuple[Ids, ...]
    log_probs: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, full: Continuation, *continuations: Ids) -> Self:
        return cls(continuations, tuple(map(full.log_probs, continuations)))

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(map(loss_per_token, self.log_probs, self.continuations))


@dataclass(frozen=True)
class Comparison:
    """A linked prompt against a full prefill.

    ``kl`` is KL(full || linked) per token of full's answer and ``first_kl`` that of the first token, both in
    nats. ``agreement`` is the share of the answer's tokens, the last one included, that are the most probable
    here as well. ``losses`` are nats per token of each continuation.
    """

    kl: float
    first_kl: float
    agreement: float
    losses: tuple[float, ...]


def full_answer(
    model: Any, ids: Sequence[int], before_forward: Callable[[], object] = lambda: None
) -> Reference:
    """A greedy answer of :data:`ANSWER_TOKENS` at most; its last token was chosen, but not run."""
    full = Continuation(model, {"input_ids": torch.tensor([list(ids)], device=model.device)}, before_forward)
    answer, rows = full.greedy(ANSWER_TOKENS, end_tokens({}, model.generation_config))
    return Reference((answer[:-1],), (rows,))


def compare(prompt: Continuation, reference: Reference) -> Comparison:
    """Run the continuations of a full prefill after a linked prompt."""
    found = tuple(map(prompt.log_probs, reference.continuations))
    full, linked = reference.log_probs[0], found[0]
    same = linked.argmax(-1).cpu() == full.argmax(-1).cpu()
    return Comparison(
        kl=divergence(full, linked),
        first_kl=divergence(full[0], linked[0]),
        agreement=float(same.double().mean()),
        losses=tuple(map(loss_per_token, found, reference.continuations)),
    )
