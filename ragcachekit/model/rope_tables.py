"""cos and sin of all positions of a prompt on a device, kept from request to request."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ragcachekit.model.rope import Rope

Turns = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Per rotary table of the model cos and sin ``[positions, pairs]``; where a layer needs it, all of them once
more, turning backwards."""

LEAST = 2048
"""Positions of the first table."""

MOST = 4
"""Tables that are kept; models whose frequencies follow every length would keep no end of them."""


class TurnTables:
    """What :meth:`Rope.place` multiplies by, for positions 0, 1, 2, ...; grows to twice its size.

    With ``inverse``: what :meth:`Rope.strip` multiplies by.

    Made on the host by the model's own rotary modules (so that it is to the bit what the CPU path uses)
    and copied once. Thread safe.
    """

    def __init__(self, rope: Rope, *, inverse: bool = False) -> None:
        self._rope, self._inverse = rope, inverse
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[torch.device, str], Turns] = OrderedDict()

    def on(self, device: torch.device, length: int) -> Turns:
        """Tables of ``length`` positions or more, with the frequencies of a prompt of ``length`` tokens."""
        regime = self._regime(length)
        with self._lock:
            turns = self._kept.pop((device, regime), None)
            if turns is None or any(cos.shape[0] < length for cos, _ in turns):
                turns = self._make(device, self._size(length, regime))
            self._kept[device, regime] = turns
            while len(self._kept) > MOST:
                self._kept.popitem(last=False)
        return turns

    def _regime(self, length: int) -> str:
        """Asked only where it can differ: it takes a run of the rotary modules."""
        rope = self._rope
        return rope.regime(length) if rope.depends_on_length or length > rope.context else ""

    def _size(self, length: int, regime: str) -> int:
        """More than is needed, where the frequencies are still those."""
        more = max(LEAST, 1 << (length - 1).bit_length())
        more = min(more, self._rope.context) if length <= self._rope.context else more
        return more if self._regime(more) == regime else length

    def _make(self, device: torch.device, size: int) -> Turns:
        angles = self._rope.angles(torch.arange(size), size)
        if self._inverse:
            onward = [(a.cos / a.m, -a.sin / a.m) for a in angles]
        else:
            onward = [(a.cos * a.m, a.sin * a.m) for a in angles]
        if any(layer.backwards for layer in self._rope.layers):
            onward += [(cos, -sin) for cos, sin in onward]
        return tuple((cos.to(device).contiguous(), sin.to(device).contiguous()) for cos, sin in onward)
