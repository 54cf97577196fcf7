"""Copies of chunk KV from host memory to the device, a few layers ahead of their use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ragcachekit.forward.copy_streams import Event, Move, Streams
from ragcachekit.model.tensor_block import TensorShape, carved, nbytes_of, offsets
from ragcachekit.store.load import AnyKV, LoadingKV
from ragcachekit_kernels.dispatch import ChunkTensors

RING_BYTES = 1 << 28
"""Device memory for copied layers; at least :data:`LEAST` layers of a prompt in any case."""

LEAST, MOST = 3, 8
"""Layers in the ring: one is put in place, one has landed, one is being copied. More are no faster."""

Shapes = tuple[tuple[TensorShape, ...], ...]
"""Of one layer's keys, values and scales (where quantised), entry by entry."""


@dataclass(eq=False)
class _Held:
    """Sources and target of copies, held until they have landed."""

    kvs: list[AnyKV]
    ring: torch.Tensor | None = None
    landed: Event | None = None

    def drain(self) -> None:
        """Wait for the copies, then release both."""
        if self.landed is not None:
            self.landed.synchronize()
        self.kvs.clear()
        self.ring = None


class Transfers:
    """Copies layers of entries to the device ahead of their use, into a ring of a few layers' memory.

    Copies have a queue of their own. Layer l's copies wait for the use of the layer that had its place in the
    ring, and its use waits for them; the host waits for neither. Entries are held until their copies have
    landed, even if the request fails. Page-locked memory makes copies asynchronous; the host tier page-locks
    an entry when it stores it. A layer in contiguous memory is one copy: enqueueing one costs as much time as
    200 KB of transfer.

    The ring of ``room`` bytes holds ``depth`` layers; ``nbytes`` are copied in all.
    """

    def __init__(self, streams: Streams, kvs: Sequence[AnyKV], room: int = RING_BYTES) -> None:
        self._streams = streams
        self._layers = kvs[0].layers
        shapes: list[Shapes] = list(zip(*(kv.stored_shapes for kv in kvs), strict=True))
        self._kinds = [one for layer, one in enumerate(shapes) if one not in shapes[:layer]]  # mostly one
        self._kind = [self._kinds.index(one) for one in shapes]
        self._size = max(offsets(_flat(shapes))[-1] for shapes in self._kinds)
        self.depth = min(self._layers, max(LEAST, min(MOST, room // max(1, self._size))))
        sizes = [sum(map(nbytes_of, _flat(shapes))) for shapes in self._kinds]
        self.nbytes = sum(sizes[kind] for kind in self._kind)
        self._sent = self._used = 0
        self._free: list[Event | None] = [None] * self.depth
        self._landed: list[Event | None] = [None] * self.depth
        self._views: dict[tuple[int, int], list[_Room]] = {}
        self._held = _Held(list(kvs))
        weakref.finalize(self, self._held.drain).atexit = False

    def begin(self) -> None:
        """Enqueue loaded layers, as many as the ring holds, without waiting."""
        while self._sent < min(self._layers, self._used + self.depth) and self._is_there(self._sent):
            self._send(self._sent)

    def use(self, layer: int, work: Callable[[Sequence[ChunkTensors]], None]) -> Event:
        """Enqueue ``work`` over one layer's keys and values on the device, in the order of the entries.

        Layers are used in order, each once; their memory is overwritten later. The event is reached when the
        work is done. ``LoadFailed`` if an entry could not be loaded; another call tries again.
        """
        assert layer == self._used < self._layers, "layers are used in order"
        if self._sent == layer:
            self._send(layer)
        slot = layer % self.depth
        chunks = self.chunks(layer)
        done = self._free[slot] = self._streams.compute(lambda: work(chunks), self._landed[slot])
        self._used += 1
        if self._used == self._layers:
            self._held.ring = None  # the compute queue, to which it belongs, is behind all copies
            self._views.clear()
        else:
            self.begin()
        return done

    def chunks(self, layer: int) -> list[ChunkTensors]:
        """Where a layer's tensors will be: the same objects for all layers that share their place."""
        return [room.chunk for room in self._rooms(layer)]

    def release(self) -> None:
        """Release the entries if all their copies have landed, without waiting."""
        held = self._held
        if self._used == self._layers and (held.landed is None or held.landed.query()):
            held.drain()

    def _is_there(self, layer: int) -> bool:
        return all(kv.ready > layer for kv in self._held.kvs if isinstance(kv, LoadingKV))

    def _send(self, layer: int) -> None:
        slot, moves = layer % self.depth, list[Move]()
        for kv, room in zip(self._held.kvs, self._rooms(layer), strict=True):
            if moves and isinstance(kv, LoadingKV) and kv.ready <= layer:
                self._copy(slot, moves)  # before waiting for the next
                moves = []
            whole = None if isinstance(kv, LoadingKV) else kv.stretches[layer]
            if whole is not None:
                moves.append((room.whole, whole))
            else:
                moves += zip(room.parts, kv.stored_layer(layer), strict=True)
        self._copy(slot, moves)
        self._sent += 1

    def _copy(self, slot: int, moves: Sequence[Move]) -> None:
        landed = self._streams.copy(moves, self._free[slot])
        self._free[slot] = None
        self._landed[slot] = self._held.landed = landed

    def _rooms(self, layer: int) -> list[_Room]:
        """A layer's place in the ring, the same for all layers of equal shapes in a slot."""
        slot, kind = layer % self.depth, self._kind[layer]
        if self._held.ring is None:
            self._held.ring = self._streams.new(self.depth * self._size)
            # Earlier kernels may still use this memory: copies wait for them.
            self._free = [self._streams.mark()] * self.depth
        found = self._views.get((slot, kind))
        if found is None:
            memory = self._held.ring[slot * self._size : (slot + 1) * self._size]
            found = self._views[slot, kind] = _carved(memory, self._kinds[kind])
        return found


def _flat(shapes: Shapes) -> list[TensorShape]:
    return [side for entry in shapes for side in entry]


@dataclass(frozen=True, eq=False)
class _Room:
    """Memory in the ring for one layer of one entry: tensor by tensor, and as one stretch."""

    parts: list[torch.Tensor]
    whole: torch.Tensor
    chunk: ChunkTensors


def _carved(memory: torch.Tensor, shapes: Shapes) -> list[_Room]:
    flat, rooms, first = _flat(shapes), list[_Room](), 0
    tensors, begins = carved(memory, flat), offsets(flat)
    for entry in shapes:
        end = first + len(entry)
        parts, stop = tensors[first:end], begins[end - 1] + nbytes_of(entry[-1])
        rooms.append(_Room(parts, memory[begins[first] : stop], ChunkTensors(parts[:2], parts[2:])))
        first = end
    return rooms
