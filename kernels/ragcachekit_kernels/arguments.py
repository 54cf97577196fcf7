"""Arguments of the kernels: checked once, and copied to a device at most once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Scale, mask and logits of one attention layer.

    - ``scale``: Factor on the products of queries and keys, before the soft-cap and the softmax.
    - ``window``: Sliding window in tokens: a row at position p sees keys ``p - window + 1 .. p``.
    - ``softcap``: Bound on the scaled scores, ``softcap * tanh(scores / softcap)`` (Gemma 2).
    - ``sinks``: ``[heads]`` natural logits that take part in the softmax and carry no value (gpt-oss).

    ValueError if the scale, window or soft-cap is not positive.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        limits = (self.scale, self.window, self.softcap)
        if any(limit is not None and limit <= 0 for limit in limits):
            raise ValueError(
                f"scale {self.scale}, window {self.window} and softcap {self.softcap} must be positive"
            )

    @property
    def is_plain(self) -> bool:
        """True without a window and a soft-cap: such kernels need fewer registers."""
        return self.window is None and self.softcap is None


@dataclass(frozen=True, eq=False)
class _OnDevices(Sequence[Item]):
    """Checked items whose tensors are copied to a device at most once."""

    items: tuple[Item, ...]
    _copies: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Raise ValueError for items that cannot be."""

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.items[index]

    def _on(self, device: torch.device, make: Callable[[], Tensor], name: object) -> Tensor:
        copy = self._copies.get((device, name))
        if copy is None:
            host = make()
            if device.type == "cuda":
                host = host.pin_memory()
            copy = self._copies[device, name] = host.to(device, non_blocking=True)
        return copy


class Rows(_OnDevices[int]):
    """Ascending positions of one forward's rows; ValueError if they do not ascend or are negative."""

    def __post_init__(self) -> None:
        if self.items and (self.items[0] < 0 or any(a >= b for a, b in pairwise(self.items))):
            raise ValueError("positions must be ascending and not negative")

    def on(self, device: torch.device) -> Tensor:
        """``[rows]`` int32 on ``device``, as kernels read them."""
        return self._on(device, lambda: torch.tensor(self.items, dtype=torch.int32), "rows")

    def as_index(self, device: torch.device) -> Tensor:
        """``[rows]`` int64 on ``device``, as torch indexes with."""
        return self._on(device, lambda: torch.tensor(self.items, dtype=torch.int64), "index")


def checked_rows(query: Tensor, key: Tensor, positions: Sequence[int]) -> Rows:
    """Rows at ``positions``; ValueError unless they ascend and fit the query and the keys."""
    if len(positions) != query.shape[1]:
        raise ValueError(f"{query.shape[1]} query rows but {len(positions)} positions")
    if query.shape[0] % key.shape[0]:
        raise ValueError(f"{query.shape[0]} query heads cannot share {key.shape[0]} KV heads")
    rows, tokens = positions if isinstance(positions, Rows) else Rows(tuple(positions)), key.shape[1]
    if rows and rows[-1] >= tokens:
        raise ValueError(f"positions must be ascending within 0..{tokens - 1}: {rows[-1]} lies outside")
    return rows


class Spans(_OnDevices[tuple[int, int]]):
    """Half-open key ranges; ValueError if one of them starts below 0 or ends before it starts."""

    def __post_init__(self) -> None:
        for start, stop in self.items:
            if not 0 <= start <= stop:
                raise ValueError(f"the span {start}..{stop} does not go forward from 0 or later")

    def on(self, device: torch.device) -> Tensor:
        """``[spans, 2]`` int32 on ``device``."""
        return self._on(device, lambda: torch.tensor(self.items, dtype=torch.int32).reshape(-1, 2), "spans")


def spans_within(spans: Sequence[tuple[int, int]], tokens: int) -> Spans:
    """Spans; ValueError unless each goes forward within ``0..tokens``."""
    checked = spans if isinstance(spans, Spans) else Spans(tuple(spans))
    for start, stop in checked:
        if stop > tokens:
            raise ValueError(f"the span {start}..{stop} does not lie within {tokens} keys")
    return checked


class Place(NamedTuple):
    """Positions ``start .. start + tokens - 1`` of a prompt, where a piece of chunk KV belongs.

    ``rotated``: its keys have RoPE for these positions already (an exact prefix) and are copied.
    """

    start: int
    tokens: int
    rotated: bool = False


class Places(_OnDevices[Place]):
    """Places of the pieces of one prompt, the same for keys and values of all layers.

    ValueError unless they ascend without overlap, from position 0 or later, with at least one token each.
    """

    def __post_init__(self) -> None:
        if any(a.start + a.tokens > b.start for a, b in pairwise(self.items)):
            raise ValueError("places must be ascending and must not overlap")
        if self.items and (self.items[0].start < 0 or any(place.tokens < 1 for place in self.items)):
            raise ValueError("a place starts at 0 or later and has at least one token")

    @property
    def stop(self) -> int:
        """Position after the last place."""
        return self.items[-1].start + self.items[-1].tokens if self.items else 0

    def rows(self, device: torch.device, chosen: tuple[int, ...]) -> Tensor:
        """``[2, rows]`` int32 for the rows of the chosen places, one after the other.

        Their positions, and the positions to rotate them to (-1: none).
        """

        def make() -> Tensor:
            parts = []
            for piece in chosen:
                start, tokens, rotated = self.items[piece]
                at = torch.arange(start, start + tokens, dtype=torch.int32)
                turn = torch.full_like(at, -1) if rotated else at
                parts.append(torch.stack((at, turn)))
            return torch.cat(parts, 1)

        return self._on(device, make, chosen)


class Rotation(NamedTuple):
    """Rotary embedding of one layer: cosines and sines ``[positions, pairs]``, float32, from position 0 on.

    ``interleaved`` and ``offset`` as for :func:`ragcachekit_kernels.dispatch.rotate`. An attention factor is
    part of both tables.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    offset: int = 0


class Group(NamedTuple):
    """Positions ``start .. stop - 1`` of a chunk; rows ``first .. last - 1`` are those computed in it."""

    start: int
    stop: int
    first: int
    last: int


class Groups(_OnDevices[Group]):
    """Chunks whose rows are moved; ValueError unless they ascend and each has tokens and recomputed rows."""

    def __post_init__(self) -> None:
        ascends = all(a.stop <= b.start and a.last <= b.first for a, b in pairwise(self.items))
        if not ascends or any(g.start >= g.stop or g.first >= g.last for g in self.items):
            raise ValueError("groups must ascend without overlap, each with tokens and recomputed rows")

    def blocks(self, device: torch.device, tokens: int) -> Tensor:
        """``[4, blocks]`` int32 on ``device``: the groups in blocks of at most ``tokens`` positions."""

        def make() -> Tensor:
            parts = (
                (start, group.stop, group.first, group.last)
                for group in self.items
                for start in range(group.start, group.stop, tokens)
            )
            return torch.tensor([*parts], dtype=torch.int32).T.contiguous()

        return self._on(device, make, tokens)
