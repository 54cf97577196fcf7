"""The attention function of admitted models: linked forwards attend by position, others as before.

Keys carry a tag from the cache layer that made them to the attention that reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.errors import ModelNotSupported
from ragcachekit_kernels.dispatch import AttentionOptions

PREFIX = "ragcachekit_"


class KeyTag(Protocol):
    """What a cache layer hands to the attention that reads its keys."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor | None:
        """Attention ``[batch, rows, heads, value_head_dim]``; None where the model's own computes it.

        ``query`` is ``[batch, heads, rows, head_dim]``, ``key`` and ``value`` are ``[batch, kv_heads, tokens,
        head_dim]``.
        """


class TaggedKeys(Tensor):
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


def tagged(tensor: Tensor, tag: KeyTag) -> Tensor:
    """The same memory, with ``tag``; the tensor itself stays untagged."""
    out = tensor.as_subclass(TaggedKeys)
    out.tag = tag
    return out


def _untagged(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor) if isinstance(tensor, TaggedKeys) else tensor


def install(model: Any) -> str:
    """Route the model's attention through ours and return the implementation's name; idempotent.

    The name contains the model's own implementation (``ragcachekit_sdpa``), which still runs all other
    forwards with its own mask function.
    """
    before = str(model.config.get_text_config()._attn_implementation)
    if is_installed(model):
        return before
    name = PREFIX + before
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(name, _forward_over(before))
        if before in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            AttentionMaskInterface.register(name, _mask_over(ALL_MASK_ATTENTION_FUNCTIONS[before]))
    model.set_attn_implementation(name)
    return name


def is_installed(model: Any) -> bool:
    """Whether the model's attention goes through ours."""
    return str(model.config.get_text_config()._attn_implementation).startswith(PREFIX)


def uninstall(model: Any) -> None:
    """Restore the model's own attention implementation."""
    name = str(model.config.get_text_config()._attn_implementation)
    if is_installed(model):
        model.set_attn_implementation(name.removeprefix(PREFIX))


def _mask_over(before: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        # Only linked forwards and batches of requests have no keys in their caches; they need no mask.
        return None if kwargs.get("kv_length") == 0 else before(*args, **kwargs)

    return mask


def _forward_over(before: str) -> Callable[..., Any]:
    def forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        tag = key.tag if isinstance(key, TaggedKeys) else None
        if not torch.compiler.is_compiling():
            raise_if_cancelled()
        query, key, value = _untagged(query), _untagged(key), _untagged(value)
        if tag is not None:
            layer = int(getattr(module, "layer_idx", 0))
            out = tag.attend(layer, query, key, value, _options(module, query, **kwargs))
            if out is not None:
                return out, None
        original = ALL_ATTENTION_FUNCTIONS[before] if before != "eager" else _eager(module)
        result: tuple[Tensor, Tensor | None] = original(module, query, key, value, attention_mask, **kwargs)
        return result

    return forward


def _eager(module: torch.nn.Module) -> Any:
    """The model's own eager attention: with a soft-cap in Gemma 2, with sinks in gpt-oss."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise ModelNotSupported(f"{type(module).__name__} has no eager_attention_forward to fall back to")
    return own


def _masked_window(module: torch.nn.Module) -> int | None:
    """The window of layers that apply it only in the mask (Qwen 2 MoE, PhiMoE).

    The admission check cannot detect it: its prompt fits into the window.
    """
    config: Any = getattr(module, "config", None)
    window: int | None = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    return window if not kinds or index is None or kinds[index] == "sliding_attention" else None


def _options(
    module: torch.nn.Module,
    query: Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> AttentionOptions:
    """Kernel options from the keyword arguments of an attention function of transformers."""
    return AttentionOptions(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window or _masked_window(module),
        softcap=softcap,
        sinks=s_aux if s_aux is not None else getattr(module, "sinks", None),
    )
