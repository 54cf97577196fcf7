"""Shape checks of KV, so that an entry of another model's shape is never linked."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from ragcachekit.model.kv import TensorShape
from ragcachekit.types import ENCODING_PREFIX, KVKey

Shapes = tuple[tuple[TensorShape, TensorShape], ...]  # per layer, dtype and shape of keys and of values

_PER_TOKEN = ("attended", "outward", "sensitivity")
_PER_SEGMENT = ("inter", "behind")


class Described(Protocol):
    """KV, or KV that is still being read."""

    @property
    def tokens(self) -> int: ...
    @property
    def start(self) -> int | None: ...
    @property
    def sums(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def shapes(self) -> Shapes: ...


class KVLayout:
    """Layers, heads, head dimensions and dtypes of one model's KV, from the shapes of a single token's KV."""

    def __init__(self, one_token: Shapes) -> None:
        self._one_token = one_token
        self._of = lru_cache(1024)(self._shapes)

    @classmethod
    def of(cls, model: Any) -> KVLayout:
        """Layout of a model, measured by one forward: configurations name these sizes differently."""
        pairs = ((layer.keys[0], layer.values[0]) for layer in one_token_cache(model).layers)
        return cls(tuple(((k.dtype, tuple(k.shape)), (v.dtype, tuple(v.shape))) for k, v in pairs))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV."""
        sides = (side for layer in self._one_token for side in layer)
        return sum(dtype.itemsize * heads * dim for dtype, (heads, _, dim) in sides)

    def misfit(self, kv: Described, tokens: int) -> str | None:
        """Why ``kv`` cannot be this model's KV of so many tokens, or None."""
        if kv.shapes == self._of(tokens):
            return None
        return f"it is {_summary(kv.shapes)}, the model's is {_summary(self._of(tokens))}"

    def _shapes(self, tokens: int) -> Shapes:
        def side(one: TensorShape) -> TensorShape:
            dtype, (heads, _, dim) = one
            return dtype, (heads, tokens, dim)

        return tuple((side(keys), side(values)) for keys, values in self._one_token)


def misfit(key: KVKey, kv: Described, tokens: int, layout: KVLayout | None) -> str | None:
    """Why the KV under ``key`` cannot be that of its ``tokens`` tokens, or None.

    Checksums find changed bytes; this finds entries of a writer with another model layout.
    """
    exact = key.encoding.partition("@")[0] == ENCODING_PREFIX
    if kv.start != (0 if exact else None):
        return f"its keys are turned for position {kv.start}, under the encoding {key.encoding}"
    if kv.tokens != tokens:
        return f"it has {kv.tokens} tokens, the chunk {tokens}"
    for name, size in (*((n, tokens) for n in _PER_TOKEN), *((n, len(key.context)) for n in _PER_SEGMENT)):
        if name in kv.sums and kv.sums[name].shape[-1:] != (size,):
            return f"its {name} has the shape {list(kv.sums[name].shape)}, not {size} at the end"
    return layout.misfit(kv, tokens) if layout is not None else None


@torch.no_grad()
def one_token_cache(model: Any) -> DynamicCache:
    """Cache of one token, which has every layer's shape."""
    cache = DynamicCache()
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache


def _summary(shapes: Shapes) -> str:
    (dtype, shape), _ = shapes[0]
    return f"{len(shapes)} layers of {list(shape)} {dtype}"
