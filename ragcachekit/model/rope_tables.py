"""Tables of cos and sin for all positions of a prompt, kept on a device between requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ragcachekit.model.rope import Rope

Turns = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Cos and sin ``[positions, pairs]`` per table; once more for backwards rotation if a layer needs it."""

LEAST = 2048
"""Positions of the first table."""

MOST = 4
"""Number of tables kept; some models have other frequencies at every length."""


class TurnTables:
    """Factors of :meth:`Rope.place` for positions 0, 1, 2, ...; of :meth:`Rope.strip` with ``inverse``.

    The model's own rotary modules compute them on the host, so they equal those of the CPU path bit by bit.
    Tables double in size when needed. Thread safe.
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
        """Name of the frequencies, computed only where it can differ: it runs the rotary modules."""
        rope = self._rope
        return rope.regime(length) if rope.depends_on_length or length > rope.context else ""

    def _size(self, length: int, regime: str) -> int:
        """Next size at which the frequencies are still the same."""
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
