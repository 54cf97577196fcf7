"""Placement of kept pieces by kernels: all layers at once, or each layer after its copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragcachekit.forward.copy_streams import Event, Streams
from ragcachekit.forward.transfers import RING_BYTES, Transfers
from ragcachekit.model.kv import ChunkKV, TensorShape
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.policies.base import LayerwisePolicy
from ragcachekit.store.loading.load import Pair
from ragcachekit_kernels import dispatch

_ALIGN = 256  # bytes, as of torch's own allocations
_VECTOR = 16  # bytes that kernels load at once
BLOCK_BYTES = 1 << 28  # of one allocation for the layers of a long prompt

_Room = tuple[int, int]
"""Slots and bytes of keys or of values."""


@dataclass(frozen=True, eq=False)
class _Item:
    """One prompt of the batch; ``sources`` are the numbers of its pieces' entries."""

    places: tuple[dispatch.Place, ...]
    sources: tuple[int, ...]
    offset: int
    tables: tuple[dispatch.Table, ...]
    skip: tuple[int, ...]


class Placing:
    """Keys and values of all layers of one batch, placed in the order in which they are read.

    Pieces that are all on the device are placed by one launch for all layers. Otherwise each layer is placed
    when it is read, from memory that :class:`Transfers` fills. One table with all addresses goes to the
    device before the first launch. Rows that the forward computes are not placed, unless a policy compares
    them with the computed ones.

    ``slots`` are the columns of the cache, ``offsets`` the column of each prompt's position 0. ``room`` are
    device bytes for copied layers. ``dtypes`` are those of each layer's keys.
    """

    def __init__(
        self,
        plans: Sequence[LinkPlan],
        rope: Rope,
        device: torch.device,
        streams: Streams,
        *,
        slots: int,
        offsets: Sequence[int],
        room: int = RING_BYTES,
    ) -> None:
        kvs = list({id(piece.kv): piece.kv for plan in plans for piece in plan.pieces}.values())
        self._near = {
            n: kv
            for n, kv in enumerate(kvs)
            if isinstance(kv, ChunkKV) and streams.holds(kv.stored_layer(0)[0])
        }
        self._far = [number for number in range(len(kvs)) if number not in self._near]
        self._rope, self._streams, self._slots = rope, streams, slots
        self._layers = kvs[0].layers
        self._shapes = kvs[0].shapes
        self.dtypes = [keys for (keys, _), _ in self._shapes]
        self._transfers: Transfers | None = None
        if self._far:
            resident = max(plan.resident for plan in plans)
            self._transfers = Transfers(streams, [kvs[number] for number in self._far], resident, room)
            self._transfers.begin()
        numbers = {id(kv): number for number, kv in enumerate(kvs)}
        self._items = [
            _item(plan, offset, numbers, rope.turns.on(device, len(plan.token_ids)))
            for plan, offset in zip(plans, offsets, strict=True)
        ]
        self._buffers: dict[int, Pair] = {}
        self._assemblies: list[dispatch.Assembly] | None = None
        self._placed = 0
        self._spans: list[tuple[Event, Event]] = []

    @property
    def coming(self) -> int:
        """Bytes to copy from the host; 0 once all layers are placed."""
        return 0 if self._transfers is None or self._placed == self._layers else self._transfers.nbytes

    @property
    def settling(self) -> float | None:
        """Seconds that the device's compute queue spent on kept rows, waits included; None if unknown."""
        if self._transfers is not None:
            self._transfers.release()
        known = [s for s in (self._streams.seconds(*span) for span in self._spans) if s is not None]
        return sum(known) if known else None

    def layer(self, number: int) -> Pair:
        """One layer's keys and values ``[batch, kv_heads, slots, head_dim]``; returned once.

        ``LoadFailed`` if an entry could not be loaded; another call tries again.
        """
        if self._assemblies is None:
            if not self._buffers:
                self._allocate()
            self._assemblies = self._prepared()
        while self._placed <= number:
            begun = self._streams.mark()
            self._spans.append((begun, self._place(self._assemblies)))
        if self._placed == self._layers:
            self._items, self._near, self._assemblies = [], {}, []
        return self._buffers.pop(number)

    def _prepared(self) -> list[dispatch.Assembly]:
        """One launch table per prompt, for all layers."""
        chunks, out = self._chunks(), []
        for batch, item in enumerate(self._items):
            if item.places:
                planes = [p for n in range(self._layers) for p in self._planes(n, batch, item.offset)]
                own = [chunks[source] for source in item.sources]
                out.append(dispatch.assembly(planes, item.places, own, item.tables, skip=item.skip))
        return out

    def _place(self, assemblies: Sequence[dispatch.Assembly]) -> Event:
        """Place all layers, or the next one after its copy."""
        planes = slice(0, None) if self._transfers is None else slice(2 * self._placed, 2 * self._placed + 2)

        def place(_: object = None) -> None:
            for assembly in assemblies:
                assembly.run(planes.start, planes.stop)

        if self._transfers is None:
            done, count = self._streams.compute(place), self._layers
        else:
            done, count = self._transfers.use(self._placed, place), 1
        self._placed += count
        return done

    def _chunks(self) -> dict[int, dispatch.ChunkTensors]:
        """Per entry, the tensors of all layers, where they are when they are used."""
        chunks = {number: kv.planes for number, kv in self._near.items()}
        if self._transfers is not None:
            layers = map(self._transfers.chunks, range(self._layers))
            for number, parts in zip(self._far, zip(*layers, strict=True), strict=True):
                chunks[number] = dispatch.ChunkTensors.joined(parts)
        return chunks

    def _planes(self, layer: int, batch: int, offset: int) -> tuple[dispatch.Plane, dispatch.Plane]:
        keys, values = (side[batch] for side in self._buffers[layer])
        if offset:
            keys, values = keys[:, offset:], values[:, offset:]
        return self._rope.planes(layer, keys, values)

    def _allocate(self) -> None:
        """Allocate all layers, each of their heads aligned to what kernels load at once.

        In several blocks for a long prompt: decoding copies layer by layer to new memory, and a block is
        free only after its last layer.
        """
        begin = size = 0
        rooms = [tuple(map(self._room, shapes)) for shapes in self._shapes]
        sizes = [keys[1] + values[1] for keys, values in rooms]
        for layer in range(self._layers):
            size += sizes[layer]
            if size + max(sizes) > BLOCK_BYTES or layer == self._layers - 1:
                self._carve(self._streams.new(size), range(begin, layer + 1), rooms)
                begin, size = layer + 1, 0

    def _carve(self, memory: torch.Tensor, layers: range, rooms: Sequence[tuple[_Room, ...]]) -> None:
        if len(self._items) > 1:
            self._streams.compute(memory.zero_)  # padding is attended with weight 0, and 0 * NaN is NaN
        typed = {dtype: memory.view(dtype) for dtype in {d for n in layers for d, _ in self._shapes[n]}}
        at = memory.storage_offset()
        for layer in layers:
            views = []
            for (dtype, (heads, _, dim)), (slots, nbytes) in zip(
                self._shapes[layer], rooms[layer], strict=True
            ):
                size = len(self._items), heads, self._slots, dim
                stride = heads * slots * dim, slots * dim, dim, 1
                views.append(typed[dtype].as_strided(size, stride, at // dtype.itemsize))
                at += nbytes
            self._buffers[layer] = views[0], views[1]

    def _room(self, side: TensorShape) -> _Room:
        """Slots that make a head's bytes a multiple of :data:`_VECTOR`, and the bytes of all heads."""
        dtype, (heads, _, dim) = side
        step = _VECTOR // math.gcd(_VECTOR, dim * dtype.itemsize)
        slots = -(-self._slots // step) * step
        nbytes = len(self._items) * heads * slots * dim * dtype.itemsize
        return slots, -(-nbytes // _ALIGN) * _ALIGN


def _item(plan: LinkPlan, offset: int, numbers: dict[int, int], tables: Sequence[dispatch.Table]) -> _Item:
    places = (dispatch.Place(p.start, p.tokens, p.kv.start is not None) for p in plan.pieces)
    sources = tuple(numbers[id(piece.kv)] for piece in plan.pieces)
    skip = () if isinstance(plan.policy, LayerwisePolicy) else plan.rows
    return _Item(tuple(places), sources, offset, tuple(tables), skip)
