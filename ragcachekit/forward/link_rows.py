"""Rows that a linked forward computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragcachekit.forward.tagged_keys import tag_of
from ragcachekit.policies.base import Observer
from ragcachekit_kernels import dispatch


@dataclass(frozen=True)
class LinkRows:
    """Rows of one linked forward.

    Attributes
    ----------
    positions : tuple of sequence of int
        Per prompt of the batch, the ascending positions of its rows. Shorter prompts are padded in front;
        padding rows are computed and discarded. Stored as ``dispatch.Rows``, so that all layers share one
        copy on the device.
    offsets : tuple of int
        Per prompt, the slot of its position 0 (the cache is left-padded to a common length).
    observer : Observer, optional
    """

    positions: tuple[Sequence[int], ...]
    offsets: tuple[int, ...]
    observer: Observer | None = None

    def __post_init__(self) -> None:
        rows = tuple(p if isinstance(p, dispatch.Rows) else dispatch.Rows(tuple(p)) for p in self.positions)
        object.__setattr__(self, "positions", rows)


def linked_rows(keys: torch.Tensor) -> LinkRows | None:
    """Rows that a cache layer attached to ``keys``, or None outside a linked forward."""
    mark = tag_of(keys)
    return mark if isinstance(mark, LinkRows) else None
