"""Detection of operations that a CUDA graph cannot hold: a failed capture harms its whole process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ragcachekit.forward.cuda_graphs.captured_cache import NotCapturable

_aten = torch.ops.aten
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MASKING = {_aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}


class RefuseWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises for operations of this thread that wait for the device or copy between it and the host.

    Only torch's operations on tensors are checked, not libraries below them nor waits for events.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, or raise :class:`NotCapturable`."""
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            raise NotCapturable(f"its forward makes the host wait for the device ({func})")
        if _copies(func, args, kwargs):
            raise NotCapturable(f"its forward copies between host and device ({func})")
        return func(*args, **kwargs)


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is _aten.index.Tensor:
        return bool(_masks(args[1]))
    if func in _MASKING:
        masks, given, value = _masks(args[1]), [at for at in args[1] if at is not None], args[2]
        # With one mask and one number of the host torch fills by the mask, without reading it.
        return bool(masks) and not (len(masks) == len(given) and value.numel() == 1 and value.is_cpu)
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return bool(_WAITING.intersection(func.tags))


def _copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is _aten._to_copy.default:
        to = kwargs.get("device")
        return to is not None and torch.device(to).type != args[0].device.type
    if func is _aten.copy_.default:
        return bool(args[0].device.type != args[1].device.type)
    # torch.tensor(numbers, device=...) passes its copied result through this.
    return func is _aten.lift_fresh.default and not args[0].is_cpu


def _masks(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
