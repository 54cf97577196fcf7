"""Result type of context mass."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ContextMass(NamedTuple):
    """Attention of a chunk's rows, summed over heads.

    Attributes
    ----------
    columns : torch.Tensor
        ``[tokens]`` float32: sum over all rows per key.
    inter : torch.Tensor
        ``[segments - 1]`` float32: sum per segment before the chunk.
    intra : torch.Tensor
        ``[]`` float32: sum within the chunk.
    outward : torch.Tensor
        ``[rows]`` float32: part of each row's attention that goes before the chunk.
    """

    columns: torch.Tensor
    inter: torch.Tensor
    intra: torch.Tensor
    outward: torch.Tensor
