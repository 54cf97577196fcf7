"""Keys that carry a tag from the cache layer that made them to the attention that reads them."""

from __future__ import annotations

from typing import Any

import torch


class TaggedKeys(torch.Tensor):
    """A tensor whose tag passes to all tensors computed from it.

    Models do not always attend over the tensor that the cache returned: multi-head latent attention expands
    its keys from it, JetMoe repeats them. The tag lives as long as these tensors, one layer's attention.
    """

    tag: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        _set_tag(out, _first_tag((*args, *(kwargs or {}).values())))
        return out


def tagged(tensor: torch.Tensor, tag: Any) -> torch.Tensor:
    """The same memory, with ``tag``; the tensor itself stays untagged."""
    out = tensor.as_subclass(TaggedKeys)
    out.tag = tag
    return out


def tag_of(tensor: torch.Tensor) -> Any:
    """The tag of ``tensor``, or None."""
    return tensor.tag if isinstance(tensor, TaggedKeys) else None


def untagged(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor."""
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, TaggedKeys) else tensor


def _first_tag(value: Any) -> Any:
    if isinstance(value, TaggedKeys):
        return value.tag
    if isinstance(value, tuple | list):
        return next((tag for tag in map(_first_tag, value) if tag is not None), None)
    return None


def _set_tag(out: Any, tag: Any) -> None:
    if isinstance(out, TaggedKeys):
        out.tag = tag
    elif isinstance(out, tuple | list):
        for item in out:
            _set_tag(item, tag)
