"""Puts the kept pieces of prompts in place by kernel: all layers at once, or each as it lands."""

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

_ALIGN = 256  # bytes; what torch's own allocations begin at
_VECTOR = 16  # bytes that kernels load at once

BLOCK_BYTES = 1 << 28
"""What the layers of a long prompt are allocated in."""

_Room = tuple[int, int]
"""Slots and bytes of keys or of values."""


@dataclass(frozen=True, eq=False)
class _Item:
    """One prompt of the batch: what it wants where. ``sources`` tells which entry each piece is of."""

    places: tuple[dispatch.Place, ...]
    sources: tuple[int, ...]
    offset: int
    tables: tuple[dispatch.Table, ...]
    skip: tuple[int, ...]


class Placing:
    """Keys and values of all layers of one batch, put in place in the order in which they are asked for.

    What lies on the device already is placed by one launch for all layers, when the first is asked for.
    Otherwise each layer is placed when it is asked for (with those before it), from memory that
    :class:`Transfers` copies into meanwhile. Either way where everything lies is known before the first,
    and goes to the device in one table. Rows that the forward will write itself are left as they
    are, unless a policy is yet to compare them with what it computes.

    Parameters
    ----------
    plans : sequence of LinkPlan
    rope : Rope
    device : torch.device
    streams : Streams
        Of that device.
    slots : int
        Columns of the cache.
    offsets : sequence of int
        Per prompt, the column of its position 0.
    room : int
        Bytes of the device for layers on their way.

    Attributes
    ----------
    device : torch.device
    dtypes : list of torch.dtype
        Of each layer's keys.
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
        self.device = device
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
    def on_device(self) -> bool:
        """Whether nothing is awaited from the host any more: to ask for a layer enqueues what it takes."""
        return self._transfers is None or self._placed == self._layers

    @property
    def coming(self) -> int:
        """Bytes that are awaited from the host, or have been."""
        return 0 if self._transfers is None else self._transfers.nbytes

    @property
    def settling(self) -> float | None:
        """Seconds for which the device's compute queue was busy with, or waited for, kept rows.

        From the end of what was enqueued before a layer was asked for to its being in place, waits of the
        host within that included. None where the device does not tell, or has not come to it yet.
        """
        if self._transfers is not None:
            self._transfers.release()
        known = [s for s in (self._streams.seconds(*span) for span in self._spans) if s is not None]
        return sum(known) if known else None

    def layer(self, number: int) -> Pair:
        """One layer's keys and values ``[batch, kv_heads, slots, head_dim]``; given out once.

        Raises
        ------
        LoadFailed
            If an entry does not come; asking again tries again.
        """
        if self._assemblies is None:
            if not self._buffers:
                self._allocate()
            self._assemblies = self._prepared()
        while self._placed <= number:
            begun = self._streams.mark()
            if self._transfers is None:
                done = self._place_all(self._assemblies)
                self._placed = self._layers
            else:
                done = self._place_next(self._transfers, self._assemblies)
                self._placed += 1
            self._spans.append((begun, done))
        if self._placed == self._layers:
            self._items, self._near, self._assemblies = [], {}, []
        return self._buffers.pop(number)

    # -- placing -----------------------------------------------------------------------------------

    def _prepared(self) -> list[dispatch.Assembly]:
        """All layers of each prompt: what layers share is packed once, and goes up in one copy."""
        chunks, out = self._chunks(), []
        for batch, item in enumerate(self._items):
            if item.places:
                planes = [p for n in range(self._layers) for p in self._planes(n, batch, item.offset)]
                own = [chunks[source] for source in item.sources]
                out.append(dispatch.assembly(planes, item.places, own, item.tables, skip=item.skip))
        return out

    def _place_all(self, assemblies: Sequence[dispatch.Assembly]) -> Event:
        def place() -> None:
            for assembly in assemblies:
                assembly.run()

        return self._streams.compute(place)

    def _place_next(self, transfers: Transfers, assemblies: Sequence[dispatch.Assembly]) -> Event:
        first = 2 * self._placed

        def place(_: Sequence[dispatch.ChunkTensors]) -> None:
            for assembly in assemblies:
                assembly.run(first, first + 2)

        return transfers.use(self._placed, place)

    def _chunks(self) -> dict[int, dispatch.ChunkTensors]:
        """Per entry, the tensors of all layers, where they are or will be when they are used."""
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

    # -- memory ------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """All layers at once, each beginning, and each of its heads, where kernels load 16 bytes at once.

        In one block, or several for a long prompt: decoding moves layer by layer to memory of its own, and
        a block is free only when the last of its layers has moved.
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
        """Slots that make a head's bytes a multiple of what is loaded at once, and the bytes of all."""
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
