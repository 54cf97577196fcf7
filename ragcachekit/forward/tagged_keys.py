"""Keys that carry a note from the cache layer that made them to the attention that reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class TaggedKeys(torch.Tensor):
    """A tensor whose mark stays on all that is computed from it.

    Models do not always attend over the very tensor that the cache handed out: multi-head latent
    attention expands its keys from it, JetMoe repeats them. The mark lives as long as these tensors
    do, which is one layer's attention; nothing else has to know which forward is running.
    """

    mark: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        _hand_on(out, _first_mark((*args, *(kwargs or {}).values())))
        return out


def tagged(tensor: torch.Tensor, mark: Any) -> torch.Tensor:
    """The same memory, with ``mark``; the tensor itself stays unmarked."""
    out = tensor.as_subclass(TaggedKeys)
    out.mark = mark
    return out


def tag_of(tensor: torch.Tensor) -> Any:
    """The mark that ``tensor`` was made under, or None."""
    return tensor.mark if isinstance(tensor, TaggedKeys) else None


def untagged(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor."""
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, TaggedKeys) else tensor


def _first_mark(values: Iterable[Any]) -> Any:
    for value in values:
        if isinstance(value, TaggedKeys):
            found = value.mark
        else:
            found = _first_mark(value) if isinstance(value, tuple | list) else None
        if found is not None:
            return found
    return None


def _hand_on(out: Any, mark: Any) -> None:
    if isinstance(out, TaggedKeys):
        out.mark = mark
    elif isinstance(out, tuple | list):
        for item in out:
            _hand_on(item, mark)
