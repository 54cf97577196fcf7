"""Placement of kept pieces by kernels: all layers at once, or each layer after its copy."""

from __future__ import annotations

import math

import torch

from ragcachekit.forward.copy_streams import Event, Streams
from ragcachekit.forward.transfers import RING_BYTES, Transfers
from ragcachekit.model.kv import ChunkKV, TensorShape
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.policies.base import LayerwisePolicy
from ragcachekit.store.load import Pair
from ragcachekit_kernels import dispatch

_ALIGN = 256  # bytes, as of torch's own allocations
_VECTOR = 16  # bytes that kernels load at once

_Room = tuple[int, int]
"""Slots and bytes of keys or of values."""


class Placing:
    """Keys and values of all layers of a prompt, placed in the order in which they are read.

    Pieces that are all on the device are placed by one launch for all layers. Otherwise each layer is placed
    when it is read, from memory that :class:`Transfers` fills. One table with all addresses goes to the
    device before the first launch. Rows that the forward computes are not placed, unless a policy compares
    them with the computed ones.

    ``room`` are device bytes for copied layers. ``dtypes`` are those of each layer's keys.
    """

    def __init__(
        self,
        plan: LinkPlan,
        rope: Rope,
        device: torch.device,
        streams: Streams,
        *,
        room: int = RING_BYTES,
    ) -> None:
        kvs = list({id(piece.kv): piece.kv for piece in plan.pieces}.values())
        self._near = [kv for kv in kvs if isinstance(kv, ChunkKV) and streams.holds(kv.stored_layer(0)[0])]
        near = {id(kv) for kv in self._near}
        far = [kv for kv in kvs if id(kv) not in near]
        self._far = [id(kv) for kv in far]
        self._plan: LinkPlan | None = plan
        self._rope, self._device, self._streams, self._slots = rope, device, streams, len(plan.token_ids)
        self._layers = kvs[0].layers
        self._shapes = kvs[0].shapes
        self.dtypes = [keys for (keys, _), _ in self._shapes]
        self._transfers: Transfers | None = None
        if far:
            self._transfers = Transfers(streams, far, room)
            self._transfers.begin()
        self._buffers: dict[int, Pair] = {}
        self._assembly: dispatch.Assembly | None = None
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
        """One layer's keys and values ``[1, kv_heads, slots, head_dim]``; returned once.

        ``LoadFailed`` if an entry could not be loaded; another call tries again.
        """
        if self._assembly is None and self._plan is not None:
            if not self._buffers:
                self._allocate()
            self._assembly = self._prepared(self._plan)
        while self._placed <= number:
            assert self._assembly is not None, "not all layers are placed"
            begun = self._streams.mark()
            self._spans.append((begun, self._place(self._assembly)))
        if self._placed == self._layers:
            self._plan, self._near, self._assembly = None, [], None
        return self._buffers.pop(number)

    def _prepared(self, plan: LinkPlan) -> dispatch.Assembly:
        """The launch table for all layers."""
        chunks = self._chunks()
        planes = [p for n in range(self._layers) for p in self._planes(n)]
        places = [dispatch.Place(p.start, p.tokens, p.kv.start is not None, p.first) for p in plan.pieces]
        own = [chunks[id(piece.kv)] for piece in plan.pieces]
        tables = self._rope.turns.on(self._device, len(plan.token_ids))
        skip = () if isinstance(plan.policy, LayerwisePolicy) else plan.rows
        return dispatch.assembly(planes, places, own, tables, skip=skip)

    def _place(self, assembly: dispatch.Assembly) -> Event:
        """Place all layers, or the next one after its copy."""
        planes = slice(0, None) if self._transfers is None else slice(2 * self._placed, 2 * self._placed + 2)

        def place(_: object = None) -> None:
            assembly.run(planes.start, planes.stop)

        if self._transfers is None:
            done, count = self._streams.compute(place), self._layers
        else:
            done, count = self._transfers.use(self._placed, place), 1
        self._placed += count
        return done

    def _chunks(self) -> dict[int, dispatch.ChunkTensors]:
        """By the entry's ``id``, the tensors of all layers, where they are when they are used."""
        chunks = {id(kv): kv.planes for kv in self._near}
        if self._transfers is not None:
            layers = map(self._transfers.chunks, range(self._layers))
            for entry, parts in zip(self._far, zip(*layers, strict=True), strict=True):
                chunks[entry] = dispatch.ChunkTensors.joined(parts)
        return chunks

    def _planes(self, layer: int) -> tuple[dispatch.Plane, dispatch.Plane]:
        keys, values = (side[0] for side in self._buffers[layer])
        return self._rope.planes(layer, keys, values)

    def _allocate(self) -> None:
        """Allocate all layers, each of their heads aligned to what kernels load at once.

        Layer by layer: decoding copies one after the other to new memory, and each is free after its copy.
        """
        for layer, shapes in enumerate(self._shapes):
            rooms = [self._room(side) for side in shapes]
            memory = self._streams.new(sum(nbytes for _, nbytes in rooms))
            at, views = 0, list[torch.Tensor]()
            for (dtype, (heads, _, dim)), (slots, nbytes) in zip(shapes, rooms, strict=True):
                size = 1, heads, self._slots, dim
                stride = heads * slots * dim, slots * dim, dim, 1
                views.append(memory[at : at + nbytes].view(dtype).as_strided(size, stride))
                at += nbytes
            self._buffers[layer] = views[0], views[1]

    def _room(self, side: TensorShape) -> _Room:
        """Slots that make a head's bytes a multiple of :data:`_VECTOR`, and the bytes of all heads."""
        dtype, (heads, _, dim) = side
        step = _VECTOR // math.gcd(_VECTOR, dim * dtype.itemsize)
        slots = -(-self._slots // step) * step
        nbytes = heads * slots * dim * dtype.itemsize
        return slots, -(-nbytes // _ALIGN) * _ALIGN
