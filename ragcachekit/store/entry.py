"""One entry as bytes: a safetensors file with its key and checksums in the metadata.

=============  ==============================================================================================
8 bytes        length of the header, little-endian
header         JSON: ``__metadata__``, then the table of tensors; padded with spaces to whole cache lines
``k.0 v.0 …``  keys and values, layer by layer
``sums.NAME``  what was recorded with them, sorted by name
=============  ==============================================================================================

The metadata holds the CRC32C of the header itself, and under ``entry`` the key and the CRC32C of every layer
and every sum. Any safetensors reader opens the files. They are read, not memory-mapped: a mapped file that is
cut short raises SIGBUS, and verified bytes could change afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch

from ragcachekit.errors import StoreError
from ragcachekit.files import NO_FOLLOW, OpenFile, parse_json, read_into
from ragcachekit.model.kv import ChunkKV, TensorShape, nbytes_of
from ragcachekit.store.base import Pair
from ragcachekit.types import KVKey

SCHEMA = "8"
"""Version of the format; entries of another one are misses."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Dtypes by their names in safetensors."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGN = 64
_LENGTH_BYTES = 8
_PROBE = 16384  # bytes of the first read: most headers
_MAX_HEADER = 100_000_000  # as the safetensors library
_NO_CRC = b"00000000"  # in a header whose CRC is computed
_compact = json.JSONEncoder(separators=(",", ":")).encode

Read = Callable[[int, int], torch.Tensor]
"""Reads so many bytes (second) from an offset (first) as uint8; fewer only at the end of the entry."""


class EntryDamaged(StoreError):
    """An entry is cut short, altered, of another schema, or that of another key."""


def hashed(text: str) -> str:
    """A name of 32 hexadecimal digits for a namespace or chunk id."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def entry_name(key: KVKey) -> str:
    """File name of an entry: the hash of its namespace and the digest of its key."""
    return f"{hashed(key.namespace)}-{key.digest()}.safetensors"


# -- header ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EntryHeader:
    """The header of an entry; ``start`` and ``quantised`` are those of :class:`ChunkKV`.

    ``layers`` has per layer the dtype and shape of keys and of values, ``sums`` those of each sum by its
    name. ``crcs`` are the CRC32C of each layer's bytes, then of each sum's.
    """

    key: KVKey
    start: int | None
    quantised: str
    layers: tuple[tuple[TensorShape, TensorShape], ...]
    sums: dict[str, TensorShape]
    crcs: tuple[int, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each layer, then of each sum, in bytes after the header, and the end of the last one."""
        layers = (nbytes_of(keys) + nbytes_of(values) for keys, values in self.layers)
        return tuple(accumulate(chain(layers, map(nbytes_of, self.sums.values())), initial=0))

    @property
    def tensors(self) -> list[tuple[str, TensorShape]]:
        """Names in the file, dtypes and shapes, in the order of their bytes."""
        layers = [
            (f"{side}.{number}", spec)
            for number, pair in enumerate(self.layers)
            for side, spec in zip("kv", pair, strict=True)
        ]
        return layers + [(f"sums.{name}", spec) for name, spec in self.sums.items()]


def encode_entry(key: KVKey, kv: ChunkKV) -> list[memoryview]:
    """The bytes of an entry, in parts: the header, then each tensor. TypeError for a dtype without a name."""
    for tensor in (*kv.keys, *kv.values, *kv.sums.values()):
        if tensor.dtype not in _NAMES:
            known = ", ".join(map(str, _NAMES))
            raise TypeError(f"KV of {tensor.dtype} cannot be stored; cast it to one of {known}")
    sums = dict(sorted(kv.sums.items()))
    layers = [(_bytes(k), _bytes(v)) for k, v in zip(kv.keys, kv.values, strict=True)]
    recorded = [_bytes(tensor) for tensor in sums.values()]
    crcs = [google_crc32c.extend(google_crc32c.value(keys), values) for keys, values in layers]
    crcs += map(google_crc32c.value, recorded)
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in sums.items()}
    header = EntryHeader(key, kv.start, kv.quantised, kv.shapes, specs, tuple(crcs))
    return [memoryview(encode_header(header)), *(raw.data for raw in (*chain(*layers), *recorded))]


def encode_header(header: EntryHeader) -> bytes:
    """Length prefix and JSON with its CRC, padded with spaces to whole cache lines."""
    key = header.key
    entry = {
        "key": [key.fingerprint, key.namespace, key.chunk_id, key.encoding, *key.context],
        "start": header.start,
        "quantised": header.quantised,
        "crcs": struct.pack(f">{len(header.crcs)}I", *header.crcs).hex(),  # of the same length for all values
    }
    metadata = {"crc32c": _NO_CRC.decode(), "schema": SCHEMA, "entry": _compact(entry)}
    fields: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in header.tensors:
        start, end = end, end + nbytes_of((dtype, shape))
        fields[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = _compact(fields).encode()
    text = text.replace(_NO_CRC, b"%08x" % google_crc32c.value(text), 1)
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGN)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def decode_header(raw: bytes) -> EntryHeader:
    """The reverse of :func:`encode_header`; EntryDamaged unless encoding the result gives the same bytes.

    So every byte, the CRC among them, is as it was written.
    """
    try:
        header = _parsed(parse_json(raw[_LENGTH_BYTES:]))
        if encode_header(header) != raw:
            raise ValueError("it does not match its CRC, or has another form")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, struct.error) as error:
        raise EntryDamaged(f"a damaged header, or of another schema: {error!r:.200}") from error
    return header


def read_header(read: Callable[[int, int], bytes], size: int) -> tuple[EntryHeader, int]:
    """The verified header of an entry of ``size`` bytes, and where the tensors start."""
    first = read(0, min(_PROBE, size))
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if end > size or not 0 < length <= _MAX_HEADER:
        raise EntryDamaged(f"a header of {length} bytes in a file of {size}")
    header = decode_header(first[:end] if end <= len(first) else read(0, end))
    if end + header.offsets[-1] != size:
        raise EntryDamaged(f"{size} bytes instead of {end + header.offsets[-1]}")
    return header, end


def _parsed(fields: Any) -> EntryHeader:
    entry = parse_json(fields.pop("__metadata__")["entry"])
    fingerprint, namespace, chunk_id, encoding, *context = entry["key"]
    key = KVKey(fingerprint, namespace, chunk_id, encoding, tuple(context))
    specs = {name: (DTYPES[field["dtype"]], tuple(field["shape"])) for name, field in fields.items()}
    layers = tuple((specs[name], specs[f"v.{name[2:]}"]) for name in specs if name.startswith("k."))
    sums = {name[5:]: spec for name, spec in specs.items() if name.startswith("sums.")}
    crcs = struct.unpack(f">{len(layers) + len(sums)}I", bytes.fromhex(entry["crcs"]))
    return EntryHeader(key, entry["start"], entry["quantised"], layers, sums, crcs)


# -- reading ---------------------------------------------------------------------------------------------


class EntryReader:
    """An entry with a verified ``header`` and ``sums``; layers are read and verified one by one.

    Used by one thread at a time. EntryDamaged unless every byte of header and sums is as it was written, or
    if it is not that of ``key``; what ``read`` raises passes through.
    """

    def __init__(self, read: Read, size: int, key: KVKey | None = None) -> None:
        self._read = read
        self.header, self._start = read_header(lambda at, nbytes: read(at, nbytes).numpy().tobytes(), size)
        if key is not None and self.header.key != key:
            raise EntryDamaged("the entry of another key")
        layers = len(self.header.layers)
        self.sums = {
            name: _tensor(self._verified(number), spec)
            for number, (name, spec) in enumerate(self.header.sums.items(), layers)
        }

    @classmethod
    def of_file(cls, file: OpenFile, key: KVKey | None = None) -> EntryReader:
        """Over an open file, which may be deleted meanwhile; OSError if it cannot be read."""
        return cls(lambda at, nbytes: _pread(file, at, nbytes), os.fstat(file.fd).st_size, key)

    @property
    def nbytes(self) -> int:
        return self.header.offsets[len(self.header.layers)]

    def layer(self, number: int) -> Pair:
        """Keys and values of one layer, in memory of their own."""
        keys, values = self.header.layers[number]
        raw, middle = self._verified(number), nbytes_of(keys)
        return _tensor(raw[:middle], keys), _tensor(raw[middle:], values)

    def kv(self) -> ChunkKV:
        header = self.header
        keys, values = zip(*map(self.layer, range(len(header.layers))), strict=True)
        return ChunkKV.checked(keys, values, header.start, self.sums, header.quantised)

    def _verified(self, number: int) -> torch.Tensor:
        """The bytes of a layer, or of a sum after them."""
        start, end = self.header.offsets[number : number + 2]
        raw = self._read(self._start + start, end - start)
        if len(raw) != end - start:
            raise EntryDamaged("the entry ends early")
        if google_crc32c.value(raw.numpy()) != self.header.crcs[number]:
            raise EntryDamaged(f"layer {number} does not match its CRC")
        return raw


def _pread(file: OpenFile, offset: int, nbytes: int) -> torch.Tensor:
    raw = torch.empty(nbytes, dtype=torch.uint8)
    view, done = raw.numpy().data, 0
    while done < nbytes and (got := read_into(file.fd, view[done:], offset + done)):
        done += got
    return raw[:done]


def open_file(path: Path | str) -> OpenFile:
    """Open an entry file without following links; EntryDamaged for what is no regular file."""
    file = OpenFile(path, os.O_RDONLY | NO_FOLLOW)
    if not stat.S_ISREG(os.fstat(file.fd).st_mode):
        file.close()
        raise EntryDamaged("not a regular file")
    return file


def read_key(path: Path) -> KVKey:
    """The key in a file's verified header; no layer is read.

    EntryDamaged if header, length or name are wrong, OSError if the file cannot be read.
    """
    with open_file(path) as file:
        entry = EntryReader.of_file(file)
        if entry_name(entry.header.key) != path.name:
            raise EntryDamaged(f"{path.name} holds the entry of another key")
    return entry.header.key


def decode_entry(raw: bytes | memoryview, key: KVKey) -> ChunkKV:
    """A copy of the KV in ``raw``; EntryDamaged unless every byte is that of :func:`encode_entry`."""
    copy = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
    return EntryReader(lambda at, nbytes: copy[at : at + nbytes], len(copy), key).kv()


def _bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of one tensor, in its own memory if that is contiguous and the CPU's."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _tensor(raw: torch.Tensor, spec: TensorShape) -> torch.Tensor:
    dtype, shape = spec
    if not len(raw):
        return torch.empty(shape, dtype=dtype)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()  # not aligned
    return raw.view(dtype).reshape(shape)
