"""Options of attention: one object for all attention and score functions."""

from __future__ import annotations

from dataclasses import dataclass

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
