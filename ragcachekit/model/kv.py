"""Chunk KV: the type that encoders return and the linker places, its shape, its extraction from caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragcachekit.model.rope import Rope, lone_kv
from ragcachekit.types import ENCODING_PREFIX, KVKey

TensorShape = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of one tensor."""


def nbytes_of(spec: TensorShape) -> int:
    """Bytes of a tensor of this dtype and shape."""
    dtype, shape = spec
    return math.prod(shape) * dtype.itemsize


Shapes = tuple[tuple[TensorShape, TensorShape], ...]
"""Per layer, dtype and shape of keys and of values."""

SCALE_OF_KEYS, SCALE_OF_VALUES = "scale.k.", "scale.v."
"""Prefixes in ``sums`` of a layer's scales: of keys ``[heads, 1, dim]``, of values ``[heads, tokens, 1]``."""

SENSITIVITY = "sensitivity"
"""Name in ``sums`` of ``[layers, tokens]``: how far values move between two encodings of a chunk."""

CONTEXTS = "contexts"
"""Name in ``sums`` of ``[n]``: a number below 2^24, exact in float32, for each context that a mean is of."""

STATE = "state."
"""Prefix in ``sums`` of what a snapshot has beside rows (:mod:`ragcachekit.model.snapshots`)."""

ASKED = "asked"
"""Name in ``sums`` of ``[layers, tokens]``: attention that the tokens get from a row of a question."""

PER_TOKEN = ("outward", SENSITIVITY, ASKED)
"""Names in ``sums`` of tensors whose last dimension are the chunk's tokens."""

TOKEN_IDS = "token_ids"
"""Name in ``sums`` of the ids of the chunk's tokens after all that it was encoded after."""


def contexts_of(kv: Any) -> tuple[int, ...]:
    """Numbers of the contexts that a mean is of, as :func:`context_number` gives them; empty for other KV."""
    return tuple(map(int, kv.sums[CONTEXTS].tolist())) if CONTEXTS in kv.sums else ()


def context_number(digest: str) -> int:
    """The number of a context from a hexadecimal digest of it."""
    return int(digest[:6], 16)


def token_ids_of(sums: Mapping[str, Tensor]) -> tuple[int, ...] | None:
    """The :data:`TOKEN_IDS`, None where they were not recorded."""
    return tuple(map(int, sums[TOKEN_IDS].tolist())) if TOKEN_IDS in sums else None


def with_token_ids(kv: ChunkKV, token_ids: Sequence[int]) -> ChunkKV:
    """The KV with its :data:`TOKEN_IDS`, in the dtype of all sums, which is exact below 2^24."""
    ids = torch.tensor(token_ids, dtype=torch.float32)
    return ChunkKV.checked(kv.keys, kv.values, kv.start, {**kv.sums, TOKEN_IDS: ids}, kv.quantised)


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """Keys and values of one chunk, layer by layer; shared and never written to.

    - ``keys``, ``values``: One tensor per layer, shape ``[kv_heads, tokens, head_dim]``; keys after q/k norm.
    - ``start``: None: keys without RoPE (and without the attention scaling m of YaRN/longrope), for any
      position. An int: keys as the model rotated them from that position on (exact prefixes).
    - ``sums``: What was measured while the chunk was encoded, float32; may be empty. For ``in-prompt`` KV,
      attention over heads and rows of the chunk: ``inter`` ``[layers, segments]``, to each segment before it;
      ``intra`` ``[layers]``, to itself; ``outward`` ``[tokens]``, of each token to segments before, mean over
      layers; ``behind`` ``[segments]``, tokens of these segments. For ``similar:n`` KV, ``sensitivity``
      ``[layers, tokens]``: the norm of the difference between a token's values and those after the system
      text alone. Of means, the root mean square of the difference between two of its ``contexts``, of which
      it has a number each, and what questions ``asked`` of a chunk. ``token_ids``: for ``forget``.
    - ``quantised``: ``int8`` or ``fp8`` if rounded to that in some tier, and so never exact; else empty.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    start: int | None = None
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    quantised: str = ""

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values) or not self.keys:
            raise ValueError("keys and values need the same, non-zero number of layers")
        sides = (*self.keys, *self.values)
        if any(t.dim() != 3 for t in sides) or len({t.shape[1] for t in sides}) != 1:
            raise ValueError("every layer must be [kv_heads, tokens, head_dim] with as many tokens")

    @classmethod
    def checked(
        cls,
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        start: int | None,
        sums: Mapping[str, Tensor],
        quantised: str,
    ) -> ChunkKV:
        """Construct without validation, which takes a tenth of a small read."""
        made = object.__new__(cls)
        made.__dict__.update(keys=keys, values=values, start=start, sums=sums, quantised=quantised)
        return made

    def each(self, change: Callable[[Tensor], Tensor]) -> ChunkKV:
        """Apply ``change`` to every key, value, scale and state tensor; other ``sums`` stay."""
        moved = (SCALE_OF_KEYS, SCALE_OF_VALUES, STATE)
        sums = {name: change(t) if name.startswith(moved) else t for name, t in self.sums.items()}
        keys, values = tuple(map(change, self.keys)), tuple(map(change, self.values))
        return replace(self, keys=keys, values=values, sums=sums)

    def to(self, device: str | torch.device) -> ChunkKV:
        """KV with keys and values on ``device``; no copy if they are there."""
        device = torch.device(device)
        devices = {tensor.device for tensor in (*self.keys, *self.values)}
        if all(at == device or (at.type == device.type and device.index is None) for at in devices):
            return self
        return self.each(lambda tensor: tensor.to(device))

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[1]

    @property
    def layers(self) -> int:
        return len(self.keys)

    @cached_property
    def shapes(self) -> Shapes:
        """Dtype and shape of keys and of values, per layer."""
        return tuple(
            ((keys.dtype, tuple(keys.shape)), (values.dtype, tuple(values.shape)))
            for keys, values in zip(self.keys, self.values, strict=True)
        )

    @property
    def has_state(self) -> bool:
        """Whether it is a snapshot with the state after its last token."""
        return any(name.startswith(STATE) for name in self.sums)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer."""
        return self.keys[number], self.values[number]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (*self.keys, *self.values, *self.sums.values()))


# -- the shape of a model's KV ------------------------------------------------------------------------


class KVLayout:
    """Layers, heads, head dimensions and dtypes of one model's KV, from the shapes of a single token's KV."""

    def __init__(self, one_token: Shapes) -> None:
        self._one_token = one_token

    @classmethod
    def of(cls, model: Any) -> KVLayout:
        """Layout of a model, measured by one forward: configurations name these sizes differently."""
        keys, values = zip(*lone_kv(model), strict=True)
        return cls(ChunkKV(keys, values).shapes)

    @property
    def token_bytes(self) -> int:
        sides = (side for layer in self._one_token for side in layer)
        return sum(dtype.itemsize * heads * dim for dtype, (heads, _, dim) in sides)

    @property
    def stored(self) -> str:
        return "keys, values per token"

    def misfit(self, kv: Any, tokens: int) -> str | None:
        """Why ``kv`` cannot be this model's KV of so many tokens, or None."""
        own = self._shapes(tokens)
        return None if kv.shapes == own else f"it is {_summary(kv.shapes)}, the model's is {_summary(own)}"

    def _shapes(self, tokens: int) -> Shapes:
        return tuple(
            ((of_keys, (*keys[:1], tokens, *keys[2:])), (of_values, (*values[:1], tokens, *values[2:])))
            for (of_keys, keys), (of_values, values) in self._one_token
        )


def misfit(key: KVKey, kv: Any, tokens: int, layout: KVLayout | None) -> str | None:
    """Why the KV under ``key`` cannot be that of its ``tokens`` tokens, or None.

    Checksums find changed bytes; this finds entries of a writer with another model layout.
    """
    exact = key.encoding.partition("@")[0] == ENCODING_PREFIX
    if kv.start != (0 if exact else None):
        return f"its keys are turned for position {kv.start}, under the encoding {key.encoding}"
    if kv.tokens != tokens:
        return f"it has {kv.tokens} tokens, the chunk {tokens}"
    sizes = {**dict.fromkeys(PER_TOKEN, tokens), **dict.fromkeys(("inter", "behind"), len(key.context))}
    for name, size in sizes.items():
        if name in kv.sums and kv.sums[name].shape[-1:] != (size,):
            return f"its {name} has the shape {list(kv.sums[name].shape)}, not {size} at the end"
    return layout.misfit(kv, tokens) if layout is not None else None


def has_nan(kv: Any) -> bool:
    """Whether a key or value is no number."""
    return any(t.isnan().any() for number in range(kv.layers) for t in kv.layer(number))


def decoder_of(model: Any) -> Any:
    """The model without its LM head: ``base_model``, but for Llama 4, which gives itself there."""
    base = model.base_model
    return base if base is not model else getattr(model, "model", model)


def _summary(shapes: Shapes) -> str:
    (dtype, shape), _ = shapes[0]
    return f"{len(shapes)} layers of {list(shape)} {dtype}"


# -- extraction from the cache of a forward ------------------------------------------------------------


class Stretch(NamedTuple):
    """Rows of one prompt of a batch: columns ``start .. stop - 1`` of its cache."""

    item: int
    start: int
    stop: int


Sides = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Keys and values of one stretch, ``[kv_heads, tokens, head_dim]`` per layer."""


def extract(
    layers: Sequence[Any],
    stretches: Sequence[Stretch],
    rope: Rope | None = None,
    length: int = 0,
    *,
    host: bool = True,
) -> list[Sides]:
    """Copy stretches of a cache, each into memory of its own.

    ``layers`` have ``keys`` and ``values`` ``[batch, kv_heads, columns, head_dim]``. ``rope`` is removed from
    the rotated side, with the frequencies of a prompt of ``length`` tokens; columns must then be positions.
    ``host``: copy to the host; otherwise results stay on the device, complete in the order of its stream.
    """
    out = []
    for item, start, stop in stretches:
        angles = None if rope is None else rope.angles(torch.arange(start, stop), length)
        keys, values = [], []
        for index, layer in enumerate(layers):
            kv = layer.keys[item, :, start:stop], layer.values[item, :, start:stop]
            if rope is not None and angles is not None:
                kv = rope.strip(index, *kv, angles)
            to = "cpu" if host else layer.keys.device
            # Copies: views would keep the whole cache alive.
            keys.append(kv[0].to(to, copy=True))
            values.append(kv[1].to(to, copy=True))
        out.append((tuple(keys), tuple(values)))
    return out
