"""The attention function of admitted models: linked forwards attend by position, others as before.

Keys carry a tag from the cache layer that made them to the attention that reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.errors import ModelChanged, ModelNotSupported
from ragcachekit_kernels import dispatch
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


# -- requests that are decoded together: one forward with a token of each, over KV of its own -------------

GROWTH = 256
"""Rows that a full buffer grows by: a copy every so many tokens, not memory for all that may come."""


class RequestKV:
    """Per layer, keys and values ``[kv_heads, capacity, head_dim]``, of which the first ``rows`` are written.

    The rows come out of ``cache`` (``[1, kv_heads, tokens, head_dim]`` per layer), whose layers are emptied
    one by one, so that no more than one layer is held twice.
    """

    def __init__(self, cache: Any, rows: int, new: int) -> None:
        self.rows = rows
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        room = rows + min(new, GROWTH)
        for layer in cache.layers:
            self.keys.append(_moved(layer.keys[0], rows, room))
            self.values.append(_moved(layer.values[0], rows, room))
            layer.keys = layer.values = None

    def make_room(self) -> None:
        """Grow full buffers by :data:`GROWTH` rows."""
        if self.rows == self.keys[0].shape[1]:
            for sides in (self.keys, self.values):
                for index, old in enumerate(sides):
                    sides[index] = _moved(old, self.rows, self.rows + GROWTH)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the row after the last one, ``[kv_heads, 1, head_dim]``; ``rows`` counts it later."""
        self.keys[layer].narrow(1, self.rows, 1).copy_(keys)
        self.values[layer].narrow(1, self.rows, 1).copy_(values)

    def as_cache(self) -> Cache:
        """Views of the written rows, ``[1, kv_heads, rows, head_dim]`` per layer."""
        layers = []
        for keys, values in zip(self.keys, self.values, strict=True):
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys[None, :, : self.rows], values[None, :, : self.rows]
            layers.append(layer)
        return Cache(layers=layers)


def _moved(side: Tensor, rows: int, room: int) -> Tensor:
    out = side.new_empty(side.shape[0], room, side.shape[2])
    out[:, :rows] = side[:, :rows]
    return out


class BatchRows(NamedTuple):
    """What one layer attends over: per item of the batch its KV, whose next row is written already."""

    requests: Sequence[RequestKV]
    number: int

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention ``[batch, 1, heads, value_head_dim]`` of ``query``, ``[batch, heads, 1, head_dim]``.

        ``key`` are the new keys as the model attends over them. ValueError if these are not the ones that it
        put into its cache (multi-head latent attention expands them in between).
        """
        one = self.requests[0].keys[self.number]
        if query.shape[2] != 1 or key.shape[1:] != (one.shape[0], 1, one.shape[2]):
            raise ValueError(f"attention over keys {tuple(key.shape)} with {tuple(one.shape)} in the cache")
        out = []
        for own, request in zip(query, self.requests, strict=True):
            keys, values = request.keys[self.number], request.values[self.number]
            if options.softcap is None and options.sinks is None:
                out.append(_attend(own, keys, values, request.rows + 1, options))
            else:
                out.append(dispatch.sparse_attention(own, keys, values, (request.rows,), options)[:, 0])
        return torch.stack(out)[:, None]


class BatchCache(Cache):  # type: ignore[misc]
    """A cache for one forward with one new token of each request, at position ``request.rows``.

    After the forward the caller counts the new rows.
    """

    def __init__(self, requests: Sequence[RequestKV]) -> None:
        layers = range(len(requests[0].keys))
        super().__init__(layers=[_BatchLayer(BatchRows(requests, layer)) for layer in layers])


class _BatchLayer(DynamicLayer):  # type: ignore[misc]
    def __init__(self, rows: BatchRows) -> None:
        super().__init__()
        self._rows = rows
        keys = rows.requests[0].keys[rows.number]
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Rows of the longest request."""
        return max(request.rows for request in self._rows.requests)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No keys: every request attends to all of its own, and no mask is made."""
        return 0, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write each request's new row, ``[batch, kv_heads, 1, head_dim]``; the tag has the others."""
        requests, layer = self._rows
        for request, keys, values in zip(requests, key_states, value_states, strict=True):
            request.write(layer, keys, values)
        return tagged(key_states, self._rows), value_states


def _attend(query: Tensor, key: Tensor, value: Tensor, rows: int, options: AttentionOptions) -> Tensor:
    """Query heads that share a KV head are rows of one attention without a mask; ``[heads, dim]``."""
    start = 0 if options.window is None else max(0, rows - options.window)
    out = scaled_dot_product_attention(
        query.reshape(1, key.shape[0], -1, query.shape[-1]),
        key[None, :, start:rows],
        value[None, :, start:rows],
        scale=options.scale,
    )
    return out.reshape(query.shape[0], -1)


@torch.no_grad()
def decode(model: Any, requests: Sequence[RequestKV], new: Sequence[int]) -> Tensor:
    """Logits ``[requests, vocab]`` after the ``new`` token of each, whose KV is added to the request's.

    If the forward fails, the requests are as they were. ModelChanged where the model attends by other code
    than ours, which would see the new rows alone.
    """
    if not is_installed(model):
        raise ModelChanged("the model's attention was exchanged while requests were decoded")
    for request in requests:
        request.make_room()
    out = model(
        input_ids=torch.tensor(new, device=model.device)[:, None],
        position_ids=torch.tensor([[request.rows] for request in requests], device=model.device),
        past_key_values=BatchCache(requests),
        use_cache=True,
    )
    for request in requests:
        request.rows += 1
    return out.logits[:, -1]  # type: ignore[no-any-return]
