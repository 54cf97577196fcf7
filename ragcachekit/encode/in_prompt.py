"""The encoder ``in-prompt``: chunks behind what really stood before them (Cache-Craft section 3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ragcachekit.forward.attention_sums import ContextCache
from ragcachekit.model.encoding import InPromptEncoding
from ragcachekit.model.extract import Stretch, extract
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import Missing


def runs(items: Iterable[Missing]) -> list[list[Missing]]:
    """Items that one forward serves: each one's prompt is how the first one's begins."""
    out: list[list[Missing]] = []
    for item in sorted(items, key=_width, reverse=True):
        for run in out:
            if _serves(run[0], item):
                run.append(item)
                break
        else:
            out.append([item])
    return out


class InPromptEncoder:
    """Runs a prompt up to its last missing chunk and takes the KV of all its missing chunks.

    An ordinary forward; beside it, what each of these chunks attends to is summed segment by segment.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Admitted: its attention goes through :func:`ragcachekit.forward.attention.install`.
    rope : Rope
    """

    def __init__(self, model: Any, rope: Rope) -> None:
        self._model = model
        self._rope = rope

    def encode(self, items: Iterable[Missing]) -> Iterator[tuple[Missing, ChunkKV]]:
        """Yield every item of an :class:`InPromptEncoding` with its KV, keys without RoPE, on the host."""
        for run in runs(items):
            kvs = self._forward(run)[::-1]
            for item in run:
                yield item, kvs.pop()  # what was stored is not held any longer

    @torch.no_grad()
    def _forward(self, run: Sequence[Missing]) -> list[ChunkKV]:
        ids = (*run[0].encoding.behind, *run[0].token_ids)
        length = max(run[0].encoding.length, len(ids))
        # One more token at the prompt's last position makes the model use that prompt's frequencies.
        stretch = [length - 1] if length > len(ids) else []
        cache = ContextCache([_segments(item) for item in run])
        device = self._model.device
        self._model.base_model(
            input_ids=torch.tensor([[*ids, *(0 for _ in stretch)]], device=device),
            position_ids=torch.tensor([[*range(len(ids)), *stretch]], device=device),
            past_key_values=cache,
            use_cache=True,
        )
        stretches = [Stretch(0, len(item.encoding.behind), _width(item)) for item in run]
        sides = extract(cache.layers, stretches, self._rope, length)
        return [ChunkKV(*kv, None, sums) for kv, sums in zip(sides, cache.sums, strict=True)]


def _segments(item: Missing) -> tuple[int, ...]:
    """Lengths of what stands before the chunk, and of the chunk itself."""
    assert isinstance(item.encoding, InPromptEncoding)
    return (*item.encoding.segments, len(item.token_ids))


def _width(item: Missing) -> int:
    return len(item.encoding.behind) + len(item.token_ids)


def _serves(first: Missing, item: Missing) -> bool:
    """Whether a forward of ``first`` passes through all of ``item``, under the same frequencies."""
    one, other = first.key, item.key
    if (one.fingerprint, one.namespace, one.encoding) != (other.fingerprint, other.namespace, other.encoding):
        return False
    whole = (*first.encoding.behind, *first.token_ids)
    return whole[: _width(item)] == (*item.encoding.behind, *item.token_ids)
