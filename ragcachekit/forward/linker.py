"""Linking: chunk KV goes to its new positions in a transformers cache that one forward completes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ragcachekit.forward.attention import tagged
from ragcachekit.forward.correction import Correct, Correction
from ragcachekit.model.encoding import InPromptEncoding
from ragcachekit.model.kv import decoder_of
from ragcachekit.model.rope import Rope
from ragcachekit.plan.link_plan import LinkPlan, Missing
from ragcachekit.plan.variants import is_average
from ragcachekit.policies.base import AttentionObserver, LayerwisePolicy
from ragcachekit.store.base import Pair
from ragcachekit.store.loader import AnyKV, LoadingKV
from ragcachekit.types import ENCODING_PREFIX
from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import AttentionOptions, Place, Places, Rows

AHEAD = 2
"""Layers that are copied to a GPU ahead of the one in use: one has arrived, one is on its way."""

MakeLayer = Callable[[], Pair]
"""Gives one layer's keys and values ``[1, kv_heads, slots, head_dim]`` with every kept row in its place.

While layer 0 computes, later layers may still be read from a slow tier; ``LoadFailed`` if that fails.
"""

BeforeLayer = Callable[[int, torch.nn.Module, Any, Any], Any]
"""Takes a decoder layer's number, the layer, its args and kwargs; returns new ``(args, kwargs)`` or None."""


class Projected(Exception):
    """Raised instead of attending when only a layer's K and V are needed."""


@dataclass(frozen=True)
class LinkRows:
    """Rows that one linked forward computes; all layers share one copy of their positions on the device."""

    positions: Rows
    observer: AttentionObserver | None = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Row i over the keys up to its position; see :class:`~ragcachekit.forward.attention.KeyTag`."""
        positions: Sequence[int] = self.positions
        if len(positions) > query.shape[2]:
            # Gemma 4 runs its last layers, which share KV of earlier ones, for the last row alone.
            positions = positions[-query.shape[2] :]
        if self.observer is not None:
            self.observer.observe(layer, query[0], key[0], positions, options)
        out = dispatch.sparse_attention(query[0], key[0], value[0], positions, options)
        return out.transpose(0, 1).contiguous()[None]


class LinkedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a linked prompt.

    Until its first ``update`` it reports only the kept rows, so that generate feeds exactly the rows to
    compute; that update scatters them to their positions. Then it is an ordinary dynamic layer, sorted by
    position. Never a sliding layer: masks come from positions, and no kept row may be dropped.

    ``slots`` columns of what ``make`` gives belong to this prompt. ``rows`` are those still to be scattered,
    ``kept`` is the length to report until then. ``correct`` corrects kept rows before that.
    """

    def __init__(
        self,
        make: MakeLayer,
        dtype: torch.dtype,
        device: torch.device,
        slots: int,
        rows: LinkRows | None,
        kept: int,
        correct: Correct | None = None,
    ) -> None:
        self._make: MakeLayer | None = None
        self._keys: Any = None
        self._values: Any = None
        super().__init__()
        self._make, self._slots, self._kept, self._correct = make, slots, kept, correct
        self.dtype, self.device = dtype, device
        self.is_initialized = True
        self.rows, self._projecting = rows, False

    @property
    def keys(self) -> Tensor:
        """``[1, kv_heads, slots, head_dim]``; waits until the layer is loaded."""
        self.settle()
        return self._keys  # type: ignore[no-any-return]

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self.settle()
        self._keys = keys

    @property
    def values(self) -> Tensor:
        self.settle()
        return self._values  # type: ignore[no-any-return]

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self.settle()
        self._values = values

    def settle(self) -> None:
        """Put the kept rows in place."""
        if self._make is not None:
            keys, values = self._make()
            self._keys, self._values = keys[:, :, : self._slots], values[:, :, : self._slots]
            self._make = None

    def narrow(self, rows: LinkRows, projecting: bool = False) -> None:
        """Expect only these rows. ``projecting``: write their K and V, then raise :class:`Projected`."""
        self.rows, self._projecting = rows, projecting

    def get_seq_length(self) -> int:
        """Kept rows before the linked forward, all rows after it."""
        return self._kept if self.rows is not None else super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No keys during the linked forward: attention goes by positions, and no mask is made."""
        return (0, 0) if self.rows is not None else super().get_mask_sizes(query_length)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Scatter the rows of the linked forward, or append."""
        if self.rows is None:
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        rows, self.rows = self.rows, None
        keys, values = self.keys, self.values
        at = rows.positions.as_index(keys.device)
        if self._correct is not None:
            self._correct(keys[0], values[0], key_states[0], value_states[0])
        keys[0].index_copy_(1, at, key_states[0])
        values[0].index_copy_(1, at, value_states[0])
        if self._projecting:
            raise Projected
        return tagged(keys, rows), values


class LinkedCache(Cache):  # type: ignore[misc]
    """A cache of :class:`LinkedLayer`; what ``rag.link`` hands to ``model.generate``.

    ``before_layer`` cuts rows from layer to layer.
    """

    def __init__(self, layers: Sequence[LinkedLayer]) -> None:
        super().__init__(layers=list(layers))
        self.before_layer: BeforeLayer | None = None

    @property
    def kernels(self) -> str:
        """Which kernels attend in the linked forward: ``triton``, or ``torch`` and why."""
        names = []
        for layer in self.layers:
            query, keys, values = layer.keys[:0], layer.keys[0], layer.values[0]
            name = dispatch.attention_choice(query, keys, values)
            names.append(f"torch ({layer.device.type})" if name == "torch" else name)
        return "; ".join(dict.fromkeys(names))

    def settle(self) -> None:
        for layer in self.layers:
            layer.settle()


@dataclass(frozen=True, eq=False)
class LinkedInputs:
    """Arguments with which ``model.generate`` or ``model(...)`` completes a linked prompt.

    ``input_ids`` and ``position_ids`` are ``[1, tokens]``: kept rows first, rows to compute last; the last
    column is the prompt's last position. ``attention_mask`` is ones.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    cache: LinkedCache

    def as_kwargs(self) -> dict[str, Any]:
        names = ("input_ids", "position_ids", "attention_mask")
        return {**{name: getattr(self, name) for name in names}, "past_key_values": self.cache}

    def run(self, model: Any, rows: int) -> Tensor:
        """Run the linked forward: the decoder over the last ``rows`` columns; returns their hidden states."""
        out = decoder_of(model)(
            input_ids=self.input_ids[:, -rows:],
            position_ids=self.position_ids[:, -rows:],
            attention_mask=self.attention_mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        return out[0]  # type: ignore[no-any-return]


def link(
    plan: LinkPlan,
    rope: Rope,
    device: torch.device,
    *,
    buffers: Sequence[MakeLayer] | None = None,
    observer: AttentionObserver | None = None,
) -> LinkedInputs:
    """Assemble the cache of a prompt with at least one cached piece.

    Kept rows of a layer are placed and rotated when the model's forward reaches it: while layer l computes,
    later ones may still be loading (Cache-Craft section 3.4.2). A piece that cannot be loaded raises
    ``LoadFailed`` then. ``buffers`` are those of an earlier link of the same prompt (:func:`assemble`); their
    kept rows must still be the linked KV. ``observer`` is called by every layer.
    """
    rows = LinkRows(Rows(plan.rows), observer) if plan.rows else None
    if buffers is None:
        buffers = assemble(plan, rope, device)
    tokens, shapes = len(plan.token_ids), plan.pieces[0].kv.shapes
    corrects: list[Correct | None] = [None] * len(shapes)
    if (correction := Correction.of(plan, device)) is not None:  # not of layer 0: no row depends on context
        turns = rope.turns_on(device, tokens)
        for index in range(1, len(shapes)):
            corrects[index] = partial(correction.apply, rope.rotations(index, turns))
    layers = [
        LinkedLayer(make, dtype, device, tokens, rows, plan.kept, correct)
        for make, correct, ((dtype, _), _) in zip(buffers, corrects, shapes, strict=True)
    ]
    ids, at = _integers(plan.token_ids), _integers(plan.rows)
    kept = torch.ones(tokens, dtype=torch.bool).index_fill_(0, at, False)
    input_ids = torch.cat([ids[kept], ids[at]])[None]
    position_ids = torch.cat([at.new_zeros(plan.kept), at])[None]
    mask = torch.ones_like(input_ids)
    return LinkedInputs(input_ids.to(device), position_ids.to(device), mask.to(device), LinkedCache(layers))


def _integers(values: Sequence[int]) -> Tensor:
    """By numpy, which converts tens of thousands of Python integers several times faster."""
    return torch.from_numpy(np.fromiter(values, np.int64, len(values)))


def assemble(plan: LinkPlan, rope: Rope, device: torch.device) -> tuple[MakeLayer, ...]:
    """Per layer, keys and values with every kept piece in its place, made when they are first read.

    Stored tensors are read only. Keys are rotated to their positions in float32 and rounded once.
    """
    tokens, pieces = len(plan.token_ids), plan.pieces
    places = Places(tuple(Place(p.start, p.tokens, p.kv.start is not None) for p in pieces))
    stored = StoredLayers({id(p.kv): p.kv for p in pieces}, device)
    shapes, turns = pieces[0].kv.shapes, rope.turns_on(device, tokens)

    def make(index: int) -> Pair:
        layer = stored.take(index)
        keys, values = (
            torch.empty(1, heads, tokens, dim, dtype=dtype, device=device)
            for dtype, (heads, _, dim) in shapes[index]
        )
        for number, out in enumerate((keys, values)):
            own = [layer[id(p.kv)][number][:, p.rows] for p in pieces]
            dispatch.assemble(out[0], own, places, rope.rotations(index, turns)[number])
        return keys, values

    return tuple(cache(partial(make, index)) for index in range(len(shapes)))


Layer = dict[int, tuple[Tensor, ...]]
"""By entry, keys and values of one layer."""


class StoredLayers:
    """Layers of entries on ``device``, each taken once.

    On a GPU, copies run a few layers ahead on a stream of their own. A layer's kernels wait for its copies;
    the host waits for neither. Page-locked memory, as of the host tier, makes the copies asynchronous.
    """

    def __init__(self, entries: Mapping[int, AnyKV], device: torch.device) -> None:
        self._entries, self._device = entries, device
        self._layers = min(kv.layers for kv in entries.values())
        self._stream: Any = None
        self._copied: dict[int, tuple[Layer, Any]] = {}
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copy_ahead(0)

    def take(self, number: int) -> Layer:
        """One layer, for kernels of the current stream; LoadFailed if an entry could not be loaded."""
        if self._stream is None:
            return self._on_device(number)
        if number not in self._copied:
            self._copy(number)
        layer, arrived = self._copied.pop(number)
        compute: Any = torch.cuda.current_stream(self._device)
        compute.wait_event(arrived)
        for tensors in layer.values():
            for tensor in tensors:
                tensor.record_stream(compute)  # its memory belongs to the stream of the copies
        self._copy_ahead(number + 1)
        return layer

    def _copy_ahead(self, first: int) -> None:
        """Begin to copy the next layers, as far as they are loaded."""
        for number in range(first, min(first + AHEAD, self._layers)):
            loading = (kv for kv in self._entries.values() if isinstance(kv, LoadingKV))
            if number not in self._copied and all(kv.ready > number for kv in loading):
                self._copy(number)

    def _copy(self, number: int) -> None:
        with torch.cuda.stream(self._stream):
            self._copied[number] = self._on_device(number), self._stream.record_event()

    def _on_device(self, number: int) -> Layer:
        return {
            key: tuple(tensor.to(self._device, non_blocking=True) for tensor in kv.layer(number))
            for key, kv in self._entries.items()
        }


# -- exact rows of a plan ------------------------------------------------------------------------------

_EXACT_IN_PLACE = (ENCODING_PREFIX, "standalone", "system")
"""Encodings whose context is a real prompt's beginning, KV and all, beside those of a prompt's own rows."""


def exact_rows(plan: LinkPlan, rotated: bool = False) -> int:
    """Number of rows from the start that equal those of an ordinary prefill.

    These are rows computed after exact rows alone, and exact pieces; with ``rotated`` also pieces stored
    without RoPE. Recomputed rows count, unless the policy cuts rows from layer to layer.
    """
    computed, layerwise = set(plan.rows), _is_layerwise(plan)
    for chunk, piece in zip(plan.placed, plan.pieces, strict=True):
        if chunk.is_exact and not piece.kv.quantised and (rotated or piece.kv.start is not None):
            continue
        for row in range(piece.start, piece.stop):
            if layerwise or row not in computed:
                return row
    return len(plan.token_ids)


def _is_layerwise(plan: LinkPlan) -> bool:
    asked = None if plan.request is None else plan.request.policy
    return any(isinstance(policy, LayerwisePolicy) for policy in (plan.policy, asked))


def segments_of(item: Missing) -> tuple[int, ...]:
    """Lengths of the segments that a chunk is encoded after, and of the chunk itself."""
    encoding, context = item.encoding, len(item.encoding.before)
    before = encoding.segments if isinstance(encoding, InPromptEncoding) else (context,) * (context > 0)
    return (*before, len(item.token_ids))


def stop_of(item: Missing) -> int:
    """Position after the chunk's last token in its prompt."""
    return len(item.encoding.before) + len(item.token_ids)


def own_entries(plan: LinkPlan) -> tuple[Missing, ...]:
    """Missing entries whose rows the request computes after just their context, and after exact rows only.

    This covers every chunk stored from the prompt's own prefill, the ``prefix``, the ``system`` chunk after
    it, and a ``standalone`` one at position 0. Entries after approximate rows need a forward of their own:
    later they would be taken for exact. Rows for means never are, and may come after approximate ones.
    """
    computed, last, layerwise = set(plan.rows), exact_rows(plan, rotated=True), _is_layerwise(plan)
    return tuple(
        item
        for item in plan.missing
        if (item.encoding.name in _EXACT_IN_PLACE or isinstance(item.encoding, InPromptEncoding))
        and (stop_of(item) <= last or (is_average(item.key) and not layerwise))
        and plan.token_ids[: stop_of(item)] == (*item.encoding.before, *item.token_ids)
        and computed.issuperset(range(len(item.encoding.before), stop_of(item)))
    )
