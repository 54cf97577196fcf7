"""One entry as bytes: a safetensors file with its key and checksums in the metadata."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import stat
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
import torch

from ragcachekit.errors import StoreError
from ragcachekit.files import NO_FOLLOW, OpenFile, parse_json, read_into, write_all
from ragcachekit.model.kv import ChunkKV
from ragcachekit.types import KVKey

Array = npt.NDArray[np.uint8]

PAGE = 4096
SMALL = 1 << 18  # bytes; below, the allocator reuses memory itself
_NEAR = 8  # memory larger by up to one eighth is taken


class Buffers:
    """Byte tensors whose memory is reused once the last tensor over it is freed.

    At most ``idle`` unused bytes are kept; with 0, tensors are in ordinary memory.
    """

    def __init__(self, idle: int) -> None:
        self._idle = idle
        # By the reference's id: a reference hashes as what it refers to, and arrays do not hash.
        self._lent: dict[int, tuple[weakref.ref[Array], mmap.mmap]] = {}
        # Filled by finalizers, which run at any moment, also while this thread holds the lock.
        self._returned: deque[mmap.mmap] = deque()
        self._free: list[mmap.mmap] = []  # latest use last
        self._lock = Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` uint8 of any content; large ones begin at a page."""
        if nbytes < SMALL or not self._idle:
            return torch.empty(nbytes, dtype=torch.uint8)
        size = -(-nbytes // PAGE) * PAGE
        memory = self._recycled(size) or _fresh(size)
        array = np.frombuffer(memory, np.uint8, nbytes)
        # Tensors hold the array, and the array holds the map.
        lent = weakref.ref(array, self._give)
        self._lent[id(lent)] = lent, memory
        return torch.from_numpy(array)

    def clear(self) -> None:
        """Free unused memory."""
        self._idle = 0
        with self._lock:
            self._collect()

    def _give(self, lent: weakref.ref[Array]) -> None:
        _, memory = self._lent.pop(id(lent), (lent, None))  # None: interrupted
        if self._idle and memory is not None:
            self._returned.append(memory)

    def _recycled(self, size: int) -> mmap.mmap | None:
        with self._lock:
            self._collect()
            for place in range(len(self._free) - 1, -1, -1):
                if size <= len(self._free[place]) <= size + size // _NEAR:
                    return self._free.pop(place)
        return None

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        held = sum(map(len, self._free))
        while held > self._idle:
            held -= len(self._free.pop(0))  # unmapped with its last reference


def _fresh(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    # Python's default is shared with forked children, which would overwrite verified bytes.
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


# Layouts are cached: entries of equal length share them.


_PIECE = 1 << 19  # bytes per write
_KEPT = 256  # layouts, of some ten KB each
_MOST_LAYERS = 1 << 16
_MOST_DIMS = 64  # of torch
_MOST_NUMBERS = 1 << 40  # zeros in a shape counted as ones, so that strides do not overflow
_COMPACT = json.JSONEncoder(separators=(",", ":")).encode

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""Names of dtypes in safetensors."""

_NUMPY_DTYPES = {torch.float64, torch.float32, torch.float16, torch.int8, torch.uint8}

DTYPES = {name: dtype for dtype, name in NAMES.items()}


def storable(dtype: torch.dtype) -> torch.dtype:
    """``dtype`` itself; TypeError if it has no safetensors name."""
    if dtype not in NAMES:
        raise TypeError(f"KV of {dtype} cannot be stored; cast it to one of {', '.join(map(str, NAMES))}")
    return dtype


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of one stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the raw tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def entry(self, name: str, offset: int) -> str:
        """This tensor's entry in a safetensors header, with its offset after the header."""
        shape, end = ",".join(map(str, self.shape)), offset + self.nbytes
        kind = NAMES[self.dtype]
        return f'{_COMPACT(name)}:{{"dtype":"{kind}","shape":[{shape}],"data_offsets":[{offset},{end}]}}'


Shape = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """Keys and values of all layers in order, keys first; made by :meth:`of` and :func:`read_layout`."""

    groups: tuple[tuple[int, TensorSpec, TensorSpec], ...]  # number of equal layers, keys, values

    @staticmethod
    def of(kv: ChunkKV) -> Layout:
        """The layout of ``kv``; TypeError for a dtype without a safetensors name."""
        runs = [(len(list(same)), *pair) for pair, same in groupby(kv.shapes)]
        specs = [(n, *(TensorSpec(storable(kind), shape) for kind, shape in pair)) for n, *pair in runs]
        return _shared(tuple((count, keys, values) for count, keys, values in specs))

    @cached_property
    def text(self) -> str:
        """The layout as short JSON."""
        return _COMPACT([[n, NAMES[k.dtype], k.shape, NAMES[v.dtype], v.shape] for n, k, v in self.groups])

    @cached_property
    def layers(self) -> int:
        """Number of layers."""
        return sum(count for count, _, _ in self.groups)

    @cached_property
    def pairs(self) -> tuple[tuple[TensorSpec, TensorSpec], ...]:
        """Keys and values of each layer."""
        return tuple(pair for count, keys, values in self.groups for pair in [(keys, values)] * count)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Begin of each layer in bytes after the header, and the end of the last one."""
        return tuple(accumulate((keys.nbytes + values.nbytes for keys, values in self.pairs), initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return self.offsets[-1]

    @cached_property
    def shapes(self) -> tuple[tuple[Shape, Shape], ...]:
        """Dtype and shape of keys and values, per layer."""
        return tuple(((k.dtype, k.shape), (v.dtype, v.shape)) for k, v in self.pairs)

    @cached_property
    def alike(self) -> TensorSpec | None:
        """The spec of every tensor, if they are all the same."""
        first = self.groups[0][1]
        return first if len(self.groups) == 1 and first == self.groups[0][2] else None

    @cached_property
    def entries(self) -> str:
        """The tensors' entries in a safetensors header."""
        named, offset = [], 0
        for number, (keys, values) in enumerate(self.pairs):
            named.append(keys.entry(f"k.{number}", offset))
            named.append(values.entry(f"v.{number}", offset + keys.nbytes))
            offset += keys.nbytes + values.nbytes
        return ",".join(named)


_shared = lru_cache(_KEPT)(Layout)


@lru_cache(_KEPT)
def read_layout(text: str) -> Layout:
    """The reverse of :attr:`Layout.text`; KeyError, TypeError or ValueError for other text."""
    groups = tuple(
        (count, spec_of(keys, keys_shape), spec_of(values, values_shape))
        for count, keys, keys_shape, values, values_shape in parse_json(text)
    )
    # By type: 2.0 and True equal 2 and 1, and the layout is shared with other entries.
    if any(type(count) is not int or not 0 < count <= _MOST_LAYERS for count, _, _ in groups):
        raise ValueError("a bad number of layers")
    shapes = [spec.shape for _, keys, values in groups for spec in (keys, values)]
    if {len(shape) for shape in shapes} != {3} or len({shape[1] for shape in shapes}) != 1:
        raise ValueError("no layers of [kv_heads, tokens, head_dim] with the same tokens")
    layout = _shared(groups)
    if layout.layers > _MOST_LAYERS or layout.text != text:
        raise ValueError("another text than that of its layers")
    return layout


def spec_of(dtype: str, shape: list[int]) -> TensorSpec:
    """The spec of a dtype's name and a shape; KeyError, TypeError or ValueError for bad ones."""
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("a bad shape")
    if len(shape) > _MOST_DIMS or math.prod(n or 1 for n in shape) > _MOST_NUMBERS:
        raise ValueError("a shape that no memory holds")
    return TensorSpec(DTYPES[dtype], tuple(shape))


def split(
    raw: torch.Tensor, layout: Layout, begin: int, end: int
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Keys and values of the layers from ``begin`` to ``end``, adjacent in ``raw``."""
    kind = layout.alike
    if kind is not None:  # all tensors in one step, not three for each
        every = as_tensor(raw, TensorSpec(kind.dtype, (2 * (end - begin), *kind.shape))).unbind()
        return every[::2], every[1::2]
    keys, values, at = [], [], 0
    for key, value in layout.pairs[begin:end]:
        middle = at + key.nbytes
        end_at = middle + value.nbytes
        keys.append(as_tensor(raw[at:middle], key))
        values.append(as_tensor(raw[middle:end_at], value))
        at = end_at
    return keys, values


def as_tensor(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """One tensor from its bytes."""
    if not raw.numel():
        return torch.empty(spec.shape, dtype=spec.dtype)
    if raw.data_ptr() % spec.dtype.itemsize:
        raw = raw.clone()  # not aligned
    return raw.view(spec.dtype).reshape(spec.shape)


class RawLayers:
    """The bytes of all layers in order, a few layers at a time.

    ``crcs`` are the running CRCs at each layer's end, complete after the iteration. Those of a piece are
    computed after it was written.
    """

    def __init__(self, kv: ChunkKV, layout: Layout) -> None:
        self._kv, self._layout = kv, layout
        self.crcs: list[int] = []

    def __iter__(self) -> Iterator[list[Array]]:
        self.crcs, crc, layout = [], 0, self._layout
        step = max(1, _PIECE * layout.layers // max(1, layout.nbytes))
        for begin in range(0, layout.layers, step):
            some = slice(begin, begin + step)
            pairs = zip(self._kv.keys[some], self._kv.values[some], strict=True)
            raws = [as_array(tensor) for pair in pairs for tensor in pair]
            yield raws
            crcs = tuple(accumulate(raws, google_crc32c.extend, initial=crc))
            self.crcs += crcs[2::2]
            crc = crcs[-1]


def as_array(tensor: torch.Tensor) -> Array:
    """The bytes of one tensor, in its own memory if that is contiguous and the CPU's."""
    # Each call below costs as much as all these checks.
    if tensor.requires_grad or not tensor.is_cpu or not tensor.is_contiguous():
        tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype not in _NUMPY_DTYPES:
        tensor = tensor.reshape(-1).view(torch.uint8)
    return tensor.numpy().reshape(-1).view(np.uint8)


# The CRC comes first, at a fixed place, and is checked before any JSON is parsed. The safetensors library
# writes metadata in no fixed order, so the header is encoded here; any safetensors reader opens the files.


SCHEMA = "5"
_ALIGN = 64  # tensors start on a cache line
_LENGTH_BYTES = 8
_SUMS = "sums."
_MAX_HEADER = 100_000_000  # as the safetensors library
_OPENING = b'{"__metadata__":{"header_crc32c":"'
_SEAL = slice(_LENGTH_BYTES + len(_OPENING), _LENGTH_BYTES + len(_OPENING) + 8)
_CRCS = _SEAL.stop + len('","running_crc32c":"')
_METADATA = len('{"__metadata__":')
_NO_SEAL = b"00000000"
_COMPACT = json.JSONEncoder(separators=(",", ":")).encode
_JSON = json.JSONDecoder()


class EntryDamaged(StoreError):
    """An entry is cut short, altered, or that of another key; ``seen`` is its file where one was opened."""

    seen: os.stat_result | None = None


@dataclass(frozen=True)
class SealedSpec:
    """One named tensor with the CRC32C of its raw bytes."""

    name: str
    tensor: TensorSpec
    crc32c: int

    @property
    def nbytes(self) -> int:
        """Bytes of the raw tensor."""
        return self.tensor.nbytes


class EntryHeader(NamedTuple):
    """The header of an entry.

    ``crcs`` are running: per layer, the CRC32C of the raw bytes of all layers up to its end, so that any
    range of layers is checked in one step. ``start``, ``quantised`` and ``sums`` are those of
    :class:`~ragcachekit.model.kv.ChunkKV`; sums follow the layers, sorted by name.
    """

    key: KVKey
    start: int | None
    layout: Layout
    crcs: tuple[int, ...]
    sums: tuple[SealedSpec, ...] = ()
    quantised: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.layout.nbytes + sum(spec.nbytes for spec in self.sums)


def encode_header(header: EntryHeader) -> bytearray:
    """Length prefix and JSON with its CRC, padded with spaces to whole cache lines."""
    entries = [header.layout.entries, *_sums_entries(header)]
    text = f'{{"__metadata__":{_COMPACT(_metadata(header))},{",".join(entries)}}}'.encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGN)
    raw = bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
    raw[_SEAL] = _seal(raw)
    return raw


def set_crcs(raw: bytearray, crcs: Sequence[int]) -> None:
    """Write the CRCs of the layers into an encoded header."""
    text = _crcs_text(crcs).encode()
    raw[_CRCS : _CRCS + len(text)] = text
    raw[_SEAL] = _seal(raw)


def header_size(prefix: bytes, file_size: int) -> int:
    """Bytes of the whole header, from the first eight bytes of a file of ``file_size`` bytes."""
    length = int.from_bytes(prefix, "little")
    size = _LENGTH_BYTES + length
    if len(prefix) < _LENGTH_BYTES or size > file_size or not len(_OPENING) < length <= _MAX_HEADER:
        raise EntryDamaged(f"a header of {length} bytes in a file of {file_size}")
    return size


def decode_header(raw: bytes) -> EntryHeader:
    """The reverse of :func:`encode_header`; EntryDamaged unless every byte is as it was written.

    Other writers of the folder can make a right CRC, so the content must also be what encoding it would give.
    """
    # Compared as text: "A" for "a" is a flipped bit too.
    if raw[_SEAL] != _seal(raw):
        raise EntryDamaged("the header does not match its CRC")
    try:
        # The object of ``__metadata__`` alone: the rest repeats it for each tensor.
        return _parse(_JSON.raw_decode(raw[_LENGTH_BYTES:].decode(), _METADATA)[0])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, struct.error) as error:
        raise EntryDamaged(f"a header of another schema: {error!r:.200}") from error


def _seal(raw: bytes | bytearray) -> bytes:
    """CRC of a header, without the place of the CRC itself."""
    crc = google_crc32c.value(bytes(raw[: _SEAL.start]) + _NO_SEAL)
    return b"%08x" % google_crc32c.extend(crc, bytes(raw[_SEAL.stop :]))


def _metadata(header: EntryHeader) -> dict[str, str]:
    """Strings alone, as safetensors requires; reads parse nothing else."""
    key = header.key
    return {
        "header_crc32c": _NO_SEAL.decode(),
        "running_crc32c": _crcs_text(header.crcs),
        "schema": SCHEMA,
        "fingerprint": key.fingerprint,
        "namespace": key.namespace,
        "chunk_id": key.chunk_id,
        "encoding": key.encoding,
        "context": _array(key.context),
        "start": "" if header.start is None else str(header.start),
        "quantised": header.quantised,
        "layers": header.layout.text,
        "sums": _array([[s.name, NAMES[s.tensor.dtype], s.tensor.shape, s.crc32c] for s in header.sums]),
    }


def _array(items: Sequence[object]) -> str:
    return _COMPACT(items) if items else "[]"  # most are empty, and encoding is slow


def _items(text: str) -> Any:
    return parse_json(text) if text != "[]" else ()


def _crcs_text(crcs: Sequence[int]) -> str:
    return struct.pack(f">{len(crcs)}I", *crcs).hex()


def _sums_entries(header: EntryHeader) -> list[str]:
    entries, offset = [], header.layout.nbytes
    for spec in header.sums:
        entries.append(spec.tensor.entry(_SUMS + spec.name, offset))
        offset += spec.nbytes
    return entries


def _parse(meta: dict[str, str]) -> EntryHeader:
    "".join(meta.values()).encode()  # strings alone, and no lone surrogates
    if meta["schema"] != SCHEMA:
        raise ValueError(f"schema {meta['schema']}, this version reads {SCHEMA}")
    layout = read_layout(meta["layers"])
    header = EntryHeader(
        KVKey(
            *(meta["fingerprint"], meta["namespace"], meta["chunk_id"], meta["encoding"]),
            tuple(_items(meta["context"])),
        ),
        int(meta["start"]) if meta["start"] else None,
        layout,
        struct.unpack(f">{layout.layers}I", bytes.fromhex(meta["running_crc32c"])),
        tuple(SealedSpec(name, spec_of(kind, shape), crc) for name, kind, shape, crc in _items(meta["sums"])),
        meta["quantised"],
    )
    names = [spec.name for spec in header.sums]
    "".join((*names, *header.key.context)).encode()  # as above, for escapes in their JSON
    if names != sorted(set(names)) or any(type(spec.crc32c) is not int for spec in header.sums):
        raise ValueError("bad sums")
    if (header.start or 0) < 0 or _metadata(header) != {**meta, "header_crc32c": _NO_SEAL.decode()}:
        raise ValueError("another text than that of its content")
    return header


At = Callable[[str], None]
"""Called with the name of each step of a write, for tests that interrupt it."""


def nowhere(step: str) -> None:
    """The :data:`At` that does nothing."""


class EntryImage:
    """The bytes of an entry, ``nbytes`` long; TypeError for KV of a dtype without a safetensors name."""

    def __init__(self, key: KVKey, kv: ChunkKV) -> None:
        layout, named = Layout.of(kv), sorted(kv.sums.items())
        self._sums = [as_array(tensor) for _, tensor in named]
        specs = tuple(
            SealedSpec(
                name, TensorSpec(storable(tensor.dtype), tuple(tensor.shape)), google_crc32c.value(raw)
            )
            for (name, tensor), raw in zip(named, self._sums, strict=True)
        )
        header = EntryHeader(key, kv.start, layout, (0,) * layout.layers, specs, kv.quantised)
        self._header, self._layers = encode_header(header), RawLayers(kv, layout)
        self.nbytes = len(self._header) + header.nbytes

    def parts(self) -> list[bytes | memoryview]:
        """Header, then keys and values, then sums."""
        raws = [raw for piece in self._layers for raw in piece]
        set_crcs(self._header, self._layers.crcs)
        return [bytes(self._header), *(raw.data for raw in (*raws, *self._sums))]

    def write(self, fd: int, at: At = nowhere) -> None:
        """Write to an open, empty file; the header, with the CRCs of the layers, last."""
        end = len(self._header)
        for piece in self._layers:
            end = write_all(fd, [raw.data for raw in piece], end)
        at("half written")
        write_all(fd, [raw.data for raw in self._sums], end)
        set_crcs(self._header, self._layers.crcs)
        write_all(fd, [self._header])
        at("written")


def from_bytes(image: memoryview, key: KVKey) -> ChunkKV:
    """A copy of the KV in ``image``; EntryDamaged unless every byte is that of :class:`EntryImage`."""
    header, start = _header(image, len(image))
    if header.key != key:
        raise EntryDamaged("the entry of another key")
    if start + header.nbytes != len(image):
        raise EntryDamaged(f"{len(image)} bytes instead of {start + header.nbytes}")
    raw = torch.from_numpy(np.frombuffer(image, np.uint8, offset=start).copy())
    layout, offset = header.layout, header.layout.nbytes
    _check(raw[:offset], header.crcs[-1])
    keys, values = split(raw[:offset], layout, 0, layout.layers)
    sums = {}
    for sealed in header.sums:
        part = raw[offset : offset + sealed.nbytes]
        _check(part, sealed.crc32c)
        sums[sealed.name] = as_tensor(part, sealed.tensor)
        offset += sealed.nbytes
    return ChunkKV(tuple(keys), tuple(values), header.start, sums, header.quantised)


def key_in(head: memoryview, size: int) -> KVKey:
    """The key in the first bytes of an entry of ``size`` bytes; EntryDamaged unless its header is whole."""
    return _header(head, size)[0].key


def _header(image: memoryview, size: int) -> tuple[EntryHeader, int]:
    end = header_size(bytes(image[:8]), size)
    return decode_header(bytes(image[:end])), end


def _check(raw: torch.Tensor, crc32c: int) -> None:
    if google_crc32c.value(raw.numpy()) != crc32c:
        raise EntryDamaged("tensors do not match their CRC")


# Not memory-mapped: a mapped file that is cut short raises SIGBUS, and verified bytes can change afterwards.


_PROBE = 8192  # bytes of the first read: most headers
_BATCH = 1 << 21  # bytes
_FRESH = Buffers(idle=0)


def entry_name(digest: str) -> str:
    """File name of the entry whose key has this digest."""
    return f"{digest}.safetensors"


class EntryReader:
    """An open entry file with verified ``header`` and ``sums``; layers are read and verified one by one.

    Used by one thread at a time. An evicted file can still be read to its end; ``status`` is that of the
    file. ``buffers`` provide memory for tensors. Raises EntryDamaged unless every byte of header and sums is
    as it was written, and OSError if the file cannot be read.
    """

    def __init__(self, path: Path | str, buffers: Buffers = _FRESH) -> None:
        self._buffers = buffers
        self._file = OpenFile(path, os.O_RDONLY | NO_FOLLOW)
        try:
            self.status = status = os.fstat(self._file.fd)
            if not stat.S_ISREG(status.st_mode):
                raise EntryDamaged("not a regular file")
            self.header, self._start = self._read_header(status.st_size)
            size = self._start + self.header.nbytes
            if size != status.st_size:
                raise EntryDamaged(f"{status.st_size} bytes instead of {size}")
            self.sums = self._read_sums() if self.header.sums else {}
        except BaseException as error:
            if isinstance(error, EntryDamaged):
                error.seen = self.status
            self.close()
            raise

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, in memory of their own; raises EntryDamaged or OSError."""
        (keys,), (values,) = self._layers(number, number + 1)
        return keys, values

    def kv(self) -> ChunkKV:
        """The whole entry; raises as :meth:`layer`."""
        layers, first = self.header.layout.layers, self.header.layout.offsets[1]
        # Small layers are read several at a time.
        step = max(1, _BATCH // first) if first else layers
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for begin in range(0, layers, step):
            some = self._layers(begin, min(begin + step, layers))
            keys += some[0]
            values += some[1]
        header = self.header  # with a layout whose shapes agree
        return ChunkKV.checked(tuple(keys), tuple(values), header.start, self.sums, header.quantised)

    def _layers(self, begin: int, end: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        layout, crcs = self.header.layout, self.header.crcs
        first = layout.offsets[begin]
        raw = self._read(self._start + first, layout.offsets[end] - first)
        if google_crc32c.extend(crcs[begin - 1] if begin else 0, raw.numpy()) != crcs[end - 1]:
            last = f" to {end - 1}" if end - begin > 1 else ""
            raise EntryDamaged(f"layer {begin}{last} does not match its CRC")
        return split(raw, layout, begin, end)

    def close(self) -> None:
        """Close the file; may be repeated."""
        self._file.close()

    def __enter__(self) -> EntryReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_header(self, file_size: int) -> tuple[EntryHeader, int]:
        first = self._read_bytes(min(_PROBE, file_size))
        size = header_size(first[:8], file_size)
        if size > len(first):
            first = self._read_bytes(size)
        return decode_header(first[:size]), size

    def _read_sums(self) -> dict[str, torch.Tensor]:
        sums, offset = {}, self._start + self.header.layout.nbytes
        for sealed in self.header.sums:
            raw = self._read(offset, sealed.nbytes)
            if google_crc32c.value(raw.numpy()) != sealed.crc32c:
                raise EntryDamaged(f"{sealed.name} does not match its CRC")
            sums[sealed.name] = as_tensor(raw, sealed.tensor)
            offset += sealed.nbytes
        return sums

    def _read(self, offset: int, nbytes: int) -> torch.Tensor:
        try:
            raw = self._buffers.take(nbytes)
        except RuntimeError as error:  # of torch
            raise OSError(errno.ENOMEM, f"no memory for {nbytes} bytes") from error
        self._fill(raw.numpy().data, offset)
        return raw

    def _read_bytes(self, nbytes: int) -> bytes:
        if hasattr(os, "pread"):  # not on Windows; spares clearing and copying the memory
            read = os.pread(self._file.fd, nbytes, 0)
            if len(read) == nbytes:
                return read
        raw = bytearray(nbytes)
        self._fill(memoryview(raw), 0)
        return bytes(raw)

    def _fill(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < view.nbytes:
            got = read_into(self._file.fd, view[done:], offset + done)
            if not got:
                raise EntryDamaged("the file ends early")
            done += got


def open_entry(path: Path | str, key: KVKey, buffers: Buffers = _FRESH) -> EntryReader:
    """A reader of the file at ``path``, which must be that of ``key``; raises as :class:`EntryReader`."""
    reader = EntryReader(path, buffers)
    if reader.header.key != key:
        reader.close()
        error = EntryDamaged(f"{os.path.basename(path)} holds the entry of another key")
        error.seen = reader.status
        raise error
    return reader


def read_key(path: Path) -> KVKey:
    """The key in a file's verified header; the layers are not read.

    Raises EntryDamaged if header, length or name are wrong, and OSError if the file cannot be read.
    """
    with EntryReader(path) as reader:
        key = reader.header.key
    if key.digest() != path.stem:
        raise EntryDamaged(f"{path.name} holds the entry of another key")
    return key
