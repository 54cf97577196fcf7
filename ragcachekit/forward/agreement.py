"""Whether two computations of the same tensor agree, as far as rounding allows."""

from __future__ import annotations

import torch

from ragcachekit.errors import ModelNotSupported


def tolerance_for(dtype: torch.dtype) -> float:
    """Allowed relative difference: rounding of two different orders of the same sums."""
    return 1e-4 if dtype in (torch.float32, torch.float64) else 6e-2


def compare(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, what: str, why: str = "") -> float:
    """The difference of two ``[..., rows, dim]``, relative to the largest value.

    ModelNotSupported, which begins with ``what``, if it is above ``tolerance``.
    """
    exact = theirs.dtype in (torch.float32, torch.float64)
    if ours.shape != theirs.shape:
        raise ModelNotSupported(f"{what}: shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}")
    size = float(theirs.abs().max()) or 1.0
    rows = (ours.float() - theirs.float()).abs().transpose(-2, 0).flatten(1).amax(1) / size
    # In half precision a router that is undecided between two experts sends a token or two another way,
    # which is no error of linking; a wrong rotation, mask or scale shows in most rows.
    difference = float(rows.max() if exact else rows.median())
    if not difference <= tolerance:
        raise ModelNotSupported(
            f"{what} differ from the model's own by {difference:.2g} of the largest value "
            f"(allowed {tolerance:.0e}){why if exact else ''}"
        )
    return difference
