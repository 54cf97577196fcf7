"""Where the attention of a chunk's rows goes."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ContextMass(NamedTuple):
    """Attention of a chunk's rows, summed over heads.

    Attributes
    ----------
    columns : torch.Tensor
        ``[tokens]`` float32: what each key gets from all rows.
    inter : torch.Tensor
        ``[segments - 1]`` float32: what each segment before the chunk gets.
    intra : torch.Tensor
        ``[]`` float32: what the chunk itself gets.
    outward : torch.Tensor
        ``[rows]`` float32: what each row gives to segments before the chunk.
    """

    columns: torch.Tensor
    inter: torch.Tensor
    intra: torch.Tensor
    outward: torch.Tensor
