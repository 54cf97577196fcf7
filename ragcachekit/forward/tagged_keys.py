"""Keys that carry a tag from the cache layer that made them to the attention that reads them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from ragcachekit_kernels.dispatch import AttentionOptions


class KeyTag(Protocol):
    """What a cache layer hands to the attention that reads its keys."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor | None:
        """Attention ``[batch, rows, heads, value_head_dim]``; None where the model's own computes it.

        ``query`` is ``[batch, heads, rows, head_dim]``, ``key`` and ``value`` are ``[batch, kv_heads, tokens,
        head_dim]``.
        """


class TaggedKeys(torch.Tensor):
    """A tensor whose tag passes to all tensors computed from it.

    Models do not always attend over the tensor that the cache returned: multi-head latent attention expands
    its keys from it, JetMoe repeats them. The tag lives as long as these tensors, one layer's attention.
    """

    tag: KeyTag | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        tag = next((leaf.tag for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, TaggedKeys)), None)
        for leaf in tree_leaves(out):
            if isinstance(leaf, TaggedKeys):
                leaf.tag = tag
        return out


def tagged(tensor: torch.Tensor, tag: KeyTag) -> torch.Tensor:
    """The same memory, with ``tag``; the tensor itself stays untagged."""
    out = tensor.as_subclass(TaggedKeys)
    out.tag = tag
    return out


def tag_of(tensor: torch.Tensor) -> KeyTag | None:
    """The tag of ``tensor``, or None."""
    return tensor.tag if isinstance(tensor, TaggedKeys) else None


def untagged(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor."""
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, TaggedKeys) else tensor
