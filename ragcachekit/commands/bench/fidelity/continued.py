"""A linked prompt and its continuations: given tokens, and the greedy answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ragcachekit.forward.attention_sums import AttentionSums, SummingCache
from ragcachekit.forward.linked_prompt import LinkedPrompt
from ragcachekit_kernels.dispatch import AttentionOptions, Rows, column_scores

ROWS = 32
"""Last rows of a prompt whose attention weighs deviations; fewer where the question is shorter."""

_PLAIN_OPTIONS = {
    *("transformers_version", "_from_model_config", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("max_new_tokens", "max_length", "use_cache", "cache_implementation"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p"),
}
_ONE_IS_NONE = ("repetition_penalty", "encoder_repetition_penalty", "num_beams", "num_beam_groups")


@dataclass(frozen=True, eq=False)
class Prefilled:
    """Log probabilities after a prompt, float64, and its KV without the prompt's last token.

    ``log_probs`` are ``[continuations]`` of ``[1 + n, vocab]``: of the next token, and of that after each of
    the ``n`` tokens of a continuation. ``keys`` and ``values`` are ``[kv_heads, tokens - 1, head_dim]`` per
    layer. ``attention`` ``[tokens]`` per layer is what each token gets from the prompt's last :data:`ROWS`
    rows, summed over heads; of prefills in full, and empty if the rows were not asked for.
    """

    log_probs: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    attention: tuple[torch.Tensor, ...] = ()


def is_plainly_greedy(config: Any) -> bool:
    """Whether greedy generation under this generation config takes the most probable token at every step.

    False for any option that is not known to leave it alone.
    """
    options = {name: value for name, value in config.to_diff_dict().items() if name not in _PLAIN_OPTIONS}
    return all(not value or (value == 1 and name in _ONE_IS_NONE) for name, value in options.items())


class ContinuedPrompt:
    """Runs continuations of one linked prompt, each from the prompt's last token on.

    A prompt of which nothing was reused is prefilled first; its attention from rows ``asking`` is summed.
    """

    def __init__(self, model: Any, linked: LinkedPrompt, asking: Sequence[int] = ()) -> None:
        self._model, inputs = model, linked.inputs
        ids, cache = inputs["input_ids"], inputs.get("past_key_values")
        self._last, self._held = int(ids[0, -1]), ids.shape[1] - 1
        self.prompt_rows = self._held
        sums = _RowSums(asking)
        if cache is None:
            # Not the model's own kind of cache, which drops keys of sliding layers.
            cache = SummingCache(sums) if asking else DynamicCache()
            with torch.no_grad():
                rows = ids if asking else ids[:, :-1]
                model.base_model(input_ids=rows, past_key_values=cache, use_cache=True)
        self._cache = cache
        self._crop(self.prompt_rows)
        self.keys = tuple(layer.keys[0] for layer in cache.layers)
        self.values = tuple(layer.values[0] for layer in cache.layers)
        self.attention = tuple(sums.layers)

    def prefilled(self, logits: Iterable[torch.Tensor]) -> Prefilled:
        """The prompt, and the log probabilities of :meth:`logits` of each continuation."""
        found = tuple(rows.double().log_softmax(-1) for rows in logits)
        return Prefilled(found, self.keys, self.values, self.attention)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """After the prompt, and after each of ``tokens``: ``[1 + len(tokens), vocab]``."""
        self._crop(self.prompt_rows)
        return self._run([self._last, *tokens])

    def greedy(
        self, logits: torch.Tensor, given: Sequence[int], ended: Callable[[Sequence[int]], bool]
    ) -> tuple[int, ...]:
        """Greedy tokens; ``logits`` are those of the continuation ``given``, which must be the last one run.

        They hold as long as the most probable tokens are ``given``; only after that tokens are decoded one
        by one. The answer is over when ``ended`` is true of its tokens.
        """
        out: list[int] = []
        for token, expected in zip(logits.argmax(-1).tolist(), (*given, None), strict=True):
            out.append(token)
            if ended(out):
                return tuple(out)
            if token != expected:
                break
        self._crop(self.prompt_rows + len(out))
        while not ended(out):
            out.append(int(self._run(out[-1:])[-1].argmax()))
        return tuple(out)

    @torch.no_grad()
    def _run(self, tokens: Sequence[int]) -> torch.Tensor:
        device, begin, end = self._model.device, self._held, self._held + len(tokens)
        output = self._model(
            input_ids=torch.tensor([list(tokens)], device=device),
            attention_mask=torch.ones(1, end, dtype=torch.long, device=device),
            position_ids=torch.arange(begin, end, device=device)[None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._held = end
        logits: torch.Tensor = output.logits[0]
        return logits

    def _crop(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the cache."""
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :rows], layer.values[:, :, :rows]
        self._held = rows


class _RowSums(AttentionSums):
    """Attention from ``rows`` of one prompt, ``[tokens]`` per layer."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(())
        self._asking = Rows(tuple(rows))
        self.layers: list[torch.Tensor] = []

    def observe(self, query: torch.Tensor, key: torch.Tensor, options: AttentionOptions) -> None:
        """One layer: ``[1, heads, tokens, head_dim]`` over ``[1, kv_heads, tokens, head_dim]``."""
        asking = query[0, :, list(self._asking)]
        self.layers.append(column_scores(asking, key[0], self._asking, options))
