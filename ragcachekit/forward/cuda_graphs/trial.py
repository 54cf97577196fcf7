"""A small linked prompt with random KV that compares a captured forward with the model's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ragcachekit.forward.cache import LayerBuffers, LinkedCache, LinkedLayer, LinkRows
from ragcachekit.forward.cuda_graphs.captured_cache import NotCapturable

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Per layer, keys and values ``[1, kv_heads, slots, head_dim]``."""

Shape = tuple[int, int, int]
"""KV heads, head_dim of keys, head_dim of values."""

ROW, LOGITS = 1e-3, 1e-3
HALF_ROW, HALF_LOGITS = 0.1, 0.25
"""Allowed norm of the difference over that of the value, in single and in half precision. Wrong positions,
masks or rows differ by about 1."""


@dataclass(frozen=True, eq=False)
class Trial:
    """The prompt: every fifth row is kept, the other ``room - 3`` are computed.

    Ids and positions are ``[1, rows]``; ``pairs`` are random KV, NaN where rows have to be written.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    positions: tuple[int, ...]
    pairs: Pairs

    @classmethod
    def made_up(
        cls, room: int, shapes: tuple[Shape, ...], vocab: int, dtype: torch.dtype, device: torch.device
    ) -> Trial:
        """For a forward over ``room`` rows."""
        slots = room * 5 // 4 + 1
        positions = tuple([p for p in range(slots) if p % 5][: room - 3])
        random = torch.Generator(device).manual_seed(0)
        pairs = []
        for heads, *dims in shapes:
            pair = [torch.randn(1, heads, slots, d, generator=random, device=device).to(dtype) for d in dims]
            for side in pair:
                side[:, :, list(positions)] = float("nan")
            pairs.append((pair[0], pair[1]))
        ids = torch.randint(vocab, (1, len(positions)), generator=random, device=device)
        return cls(ids, torch.tensor([positions], device=device), positions, pairs)

    def copy(self) -> Pairs:
        """A copy of the KV."""
        return [(keys.clone(), values.clone()) for keys, values in self.pairs]

    def cache(self, pairs: Pairs) -> LinkedCache:
        """A linked cache over ``pairs`` before its forward."""
        rows = LinkRows((self.positions,), (0,))
        slots = pairs[0][0].shape[2]
        kept = slots - len(self.positions)
        buffers = [LayerBuffers(lambda pair=pair: pair, pair[0].dtype, pair[0].device) for pair in pairs]
        return LinkedCache([LinkedLayer(each, slots, rows, kept) for each in buffers])

    def run(self, forward: Callable[..., Any], pairs: Pairs) -> torch.Tensor:
        """The model's own linked forward over ``pairs``: logits ``[1, 1, vocab]``."""
        slots = pairs[0][0].shape[2]
        logits: torch.Tensor = forward(
            input_ids=self.input_ids,
            position_ids=self.position_ids,
            attention_mask=torch.ones(1, slots, dtype=torch.long, device=self.input_ids.device),
            past_key_values=self.cache(pairs),
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
        ).logits
        return logits

    def compare(self, ours: Pairs, theirs: Pairs) -> None:
        """Raise ``NotCapturable`` for a layer whose KV differs after the two forwards."""
        rows = torch.tensor(self.positions, device=self.input_ids.device)
        kept = torch.ones(ours[0][0].shape[2], dtype=torch.bool, device=rows.device)
        kept[rows] = False
        for layer, sides in enumerate(zip(ours, theirs, strict=True)):
            for own, other in zip(*sides, strict=True):
                if not torch.equal(own[:, :, kept], other[:, :, kept]):
                    raise NotCapturable(f"layer {layer} writes outside of its rows")
                apart = _apart(*(side[0, :, rows].transpose(0, 1).flatten(1) for side in (own, other)))
                _demand(apart, ROW if own.dtype.itemsize > 2 else HALF_ROW, f"the rows of layer {layer}")


def compare_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Raise ``NotCapturable`` if the logits ``[1, 1, vocab]`` of the last row differ."""
    if ours.shape != theirs.shape:
        raise NotCapturable(f"its logits have shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}")
    _demand(_apart(ours[0], theirs[0]), LOGITS if theirs.dtype.itemsize > 2 else HALF_LOGITS, "the logits")


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative distance over ``[rows, width]``: the worst row's; in half precision, where MoE routers
    may choose otherwise, the median row's."""
    size = theirs.float().norm(dim=-1).clamp_min(1e-12)
    apart = (ours.float() - theirs.float()).norm(dim=-1) / size
    return float(apart.max() if theirs.dtype.itemsize > 2 else apart.median())


def _demand(apart: float, allowed: float, what: str) -> None:
    if not apart <= allowed:
        raise NotCapturable(f"{what} differ from the model's own by {apart:.2g} (allowed {allowed:g})")
