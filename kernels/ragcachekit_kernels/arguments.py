"""Arguments of the kernels: attention options, rows, key ranges, and the places of chunk KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Scale, mask and logits of one attention layer.

    Attributes
    ----------
    scale : float
        Factor on the products of queries and keys, before the soft-cap and the softmax.
    window : int, optional
        Sliding window in tokens: a row at position p sees keys ``p - window + 1 .. p``. None: ``0 .. p``.
    softcap : float, optional
        Bound on the scaled scores, ``softcap * tanh(scores / softcap)`` (Gemma 2).
    sinks : torch.Tensor, optional
        ``[heads]`` natural logits that take part in the softmax and carry no value (gpt-oss).

    Raises
    ------
    ValueError
        If the scale, window or soft-cap is not positive.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

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


class _OnDevices:
    """Tensors by device, copied there at most once."""

    def __init__(self) -> None:
        self._copies: dict[Any, torch.Tensor] = {}

    def get(
        self, device: torch.device, make: Callable[[], torch.Tensor], name: object = None
    ) -> torch.Tensor:
        copy = self._copies.get((device, name))
        if copy is None:
            host = make()
            if device.type == "cuda":
                host = host.pin_memory()
            copy = self._copies[device, name] = host.to(device, non_blocking=True)
        return copy


@dataclass(frozen=True, eq=False)
class Rows(Sequence[int]):
    """Ascending positions of one forward's rows, checked once and copied to a device at most once.

    Raises
    ------
    ValueError
        If the positions are not ascending or negative.
    """

    positions: tuple[int, ...]
    _copies: _OnDevices = field(default_factory=_OnDevices, repr=False)

    def __post_init__(self) -> None:
        if self.positions and (self.positions[0] < 0 or any(a >= b for a, b in pairwise(self.positions))):
            raise ValueError("positions must be ascending and not negative")

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.positions[index]

    def on(self, device: torch.device) -> torch.Tensor:
        """``[rows]`` int32 on ``device``, as kernels read them."""
        return self._copies.get(device, lambda: torch.tensor(self.positions, dtype=torch.int32))

    def as_index(self, device: torch.device) -> torch.Tensor:
        """``[rows]`` int64 on ``device``, as torch indexes with."""
        return self._copies.get(device, lambda: torch.tensor(self.positions, dtype=torch.int64), "index")


def rows_within(positions: Sequence[int], tokens: int) -> Rows:
    """Rows at ``positions``; ValueError unless these are ascending within ``0..tokens - 1``."""
    rows = positions if isinstance(positions, Rows) else Rows(tuple(positions))
    if rows and rows[-1] >= tokens:
        raise ValueError(f"positions must be ascending within 0..{tokens - 1}: {rows[-1]} lies outside")
    return rows


def checked_rows(query: torch.Tensor, key: torch.Tensor, positions: Sequence[int]) -> Rows:
    """Rows at ``positions``; ValueError unless they fit the query and the keys."""
    if len(positions) != query.shape[1]:
        raise ValueError(f"{query.shape[1]} query rows but {len(positions)} positions")
    if query.shape[0] % key.shape[0]:
        raise ValueError(f"{query.shape[0]} query heads cannot share {key.shape[0]} KV heads")
    return rows_within(positions, key.shape[1])


@dataclass(frozen=True, eq=False)
class Spans(Sequence[tuple[int, int]]):
    """Half-open key ranges, copied to a device at most once.

    Raises
    ------
    ValueError
        If one of them starts below 0 or ends before it starts.
    """

    ranges: tuple[tuple[int, int], ...]
    _copies: _OnDevices = field(default_factory=_OnDevices, repr=False)

    def __post_init__(self) -> None:
        for start, stop in self.ranges:
            if not 0 <= start <= stop:
                raise ValueError(f"the span {start}..{stop} does not go forward from 0 or later")

    def __len__(self) -> int:
        return len(self.ranges)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.ranges[index]

    def on(self, device: torch.device) -> torch.Tensor:
        """``[spans, 2]`` int32 on ``device``."""
        return self._copies.get(device, lambda: torch.tensor(self.ranges, dtype=torch.int32).reshape(-1, 2))


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


@dataclass(frozen=True, eq=False)
class Places(Sequence[Place]):
    """Places of the pieces of one prompt, the same for keys and values of all layers; checked once.

    Raises
    ------
    ValueError
        Unless the places ascend without overlap, from position 0 or later, with at least one token each.
    """

    places: tuple[Place, ...]
    _copies: _OnDevices = field(default_factory=_OnDevices, repr=False)

    def __post_init__(self) -> None:
        if any(a.start + a.tokens > b.start for a, b in pairwise(self.places)):
            raise ValueError("places must be ascending and must not overlap")
        if self.places and (self.places[0].start < 0 or any(place.tokens < 1 for place in self.places)):
            raise ValueError("a place starts at 0 or later and has at least one token")

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.places[index]

    @property
    def stop(self) -> int:
        """Position after the last place."""
        return self.places[-1].start + self.places[-1].tokens if self.places else 0

    def rows(self, device: torch.device, chosen: tuple[int, ...]) -> torch.Tensor:
        """``[3, rows]`` int32 for the rows of the chosen places, one after the other.

        Their positions, the positions to rotate them to (-1: none), and the numbers of their pieces among the
        chosen ones.
        """

        def make() -> torch.Tensor:
            parts = []
            for number, piece in enumerate(chosen):
                start, tokens, rotated = self.places[piece]
                at = torch.arange(start, start + tokens, dtype=torch.int32)
                turn = torch.full_like(at, -1) if rotated else at
                parts.append(torch.stack((at, turn, torch.full_like(at, number))))
            return torch.cat(parts, 1)

        return self._copies.get(device, make, chosen)


class Rotation(NamedTuple):
    """Rotary embedding of one layer: cosines and sines ``[positions, pairs]``, float32, from position 0 on.

    ``interleaved`` and ``offset`` as for :func:`ragcachekit_kernels.dispatch.rotate`. An attention factor is
    part of both tables.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False
    offset: int = 0
