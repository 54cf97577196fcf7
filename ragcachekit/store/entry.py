"""One entry as bytes: a safetensors file with its key and checksums in the metadata.

=============  ==============================================================================================
8 bytes        length of the header, little-endian
header         JSON: ``__metadata__``, then the table of tensors; padded with spaces to whole cache lines
``k.0 v.0 …``  keys and values, layer by layer
``sums.NAME``  what was recorded with them, sorted by name
=============  ==============================================================================================

The metadata holds the CRC32C of the header itself, at a fixed place that is checked before any JSON is
parsed, and under ``entry`` the key and the CRC32C of every layer and every sum. Any safetensors reader opens
the files. They are read, not memory-mapped: a mapped file that is cut short raises SIGBUS, and verified bytes
could change afterwards.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch

from ragcachekit.errors import StoreError
from ragcachekit.files import NO_FOLLOW, OpenFile, parse_json, read_into
from ragcachekit.model.kv import ChunkKV, TensorShape
from ragcachekit.types import KVKey

SCHEMA = "6"
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
_PROBE = 8192  # bytes of the first read: most headers
_BATCH = 2 << 20  # bytes of layers that are read at once
_MAX_HEADER = 100_000_000  # as the safetensors library
_MAX_LAYERS = 1 << 16
_MAX_ELEMENTS = 1 << 40  # with zeros in a shape counted as ones, so that strides do not overflow
_METADATA = b'{"__metadata__":'
_OPENING = _METADATA + b'{"crc32c":"'
_SEAL = slice(_LENGTH_BYTES + len(_OPENING), _LENGTH_BYTES + len(_OPENING) + 8)
_NO_SEAL = b"00000000"
_JSON = json.JSONDecoder()
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


def check_storable(kv: ChunkKV) -> None:
    """Raise TypeError for KV of a dtype without a safetensors name."""
    for tensor in (*kv.keys, *kv.values, *kv.sums.values()):
        if tensor.dtype not in _NAMES:
            raise TypeError(
                f"KV of {tensor.dtype} cannot be stored; cast it to one of {', '.join(map(str, _NAMES))}"
            )


def nbytes_of(spec: TensorShape) -> int:
    """Bytes of a tensor of this dtype and shape."""
    dtype, shape = spec
    return math.prod(shape) * dtype.itemsize


# -- header ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EntryHeader:
    """The header of an entry; ``start`` and ``quantised`` are those of :class:`ChunkKV`.

    ``layers`` has per layer the dtype and shape of keys and of values, ``crcs`` the CRC32C of the bytes of
    both. ``sums`` are name, dtype and shape, CRC32C.
    """

    key: KVKey
    start: int | None
    quantised: str
    layers: tuple[tuple[TensorShape, TensorShape], ...]
    crcs: tuple[int, ...]
    sums: tuple[tuple[str, TensorShape, int], ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each layer in bytes after the header, and the end of the last one."""
        return tuple(accumulate((nbytes_of(k) + nbytes_of(v) for k, v in self.layers), initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.offsets[-1] + sum(nbytes_of(spec) for _, spec, _ in self.sums)

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return self.layers[0][0][1][1]


def encode_entry(key: KVKey, kv: ChunkKV) -> list[memoryview]:
    """The bytes of an entry, in parts: the header, then each tensor. TypeError for a dtype without a name."""
    check_storable(kv)
    layers = [(_bytes(k), _bytes(v)) for k, v in zip(kv.keys, kv.values, strict=True)]
    sums = [(name, tensor, _bytes(tensor)) for name, tensor in sorted(kv.sums.items())]
    header = EntryHeader(
        key,
        kv.start,
        kv.quantised,
        kv.shapes,
        tuple(google_crc32c.extend(google_crc32c.value(keys), values) for keys, values in layers),
        tuple((name, (t.dtype, tuple(t.shape)), google_crc32c.value(raw)) for name, t, raw in sums),
    )
    tensors = [raw for pair in layers for raw in pair] + [raw for *_, raw in sums]
    return [memoryview(encode_header(header)), *(raw.data for raw in tensors)]


def encode_header(header: EntryHeader) -> bytes:
    """Length prefix and JSON with its CRC, padded with spaces to whole cache lines."""
    tensors = [
        (f"{name}.{number}", spec)
        for number, pair in enumerate(header.layers)
        for name, spec in zip("kv", pair, strict=True)
    ] + [(f"sums.{name}", spec) for name, spec, _ in header.sums]
    ends = list(accumulate((nbytes_of(spec) for _, spec in tensors), initial=0))
    fields: dict[str, Any] = {
        "__metadata__": {"crc32c": _NO_SEAL.decode(), "schema": SCHEMA, "entry": _compact(_fields(header))}
    }
    for (name, (dtype, shape)), start, end in zip(tensors, ends, ends[1:], strict=False):
        fields[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = _compact(fields).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGN)
    raw = bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
    raw[_SEAL] = _seal(raw)
    return bytes(raw)


def decode_header(raw: bytes) -> EntryHeader:
    """The reverse of :func:`encode_header`; EntryDamaged unless every byte is as it was written.

    Others who write to the folder can make a right CRC, so the content is checked as well.
    """
    if raw[_SEAL] != _seal(raw):
        raise EntryDamaged("the header does not match its CRC")
    try:
        meta, _ = _JSON.raw_decode(raw[_LENGTH_BYTES:].decode(), len(_METADATA))
        if meta["schema"] != SCHEMA:
            raise ValueError(f"schema {meta['schema']}, this version reads {SCHEMA}")
        return _parsed(parse_json(meta["entry"]))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, struct.error) as error:
        raise EntryDamaged(f"a header of another schema: {error!r:.200}") from error


def read_header(read: Callable[[int, int], bytes], size: int) -> tuple[EntryHeader, int]:
    """The verified header of an entry of ``size`` bytes, and where the tensors start."""
    first = read(0, min(_PROBE, size))
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if end > size or not len(_OPENING) < length <= _MAX_HEADER:
        raise EntryDamaged(f"a header of {length} bytes in a file of {size}")
    raw = first[:end] if end <= len(first) else read(0, end)
    header = decode_header(raw)
    if end + header.nbytes != size:
        raise EntryDamaged(f"{size} bytes instead of {end + header.nbytes}")
    return header, end


def _seal(raw: bytes | bytearray) -> bytes:
    """CRC of a header, with zeros in the place of the CRC itself."""
    crc = google_crc32c.value(bytes(raw[: _SEAL.start]) + _NO_SEAL)
    return b"%08x" % google_crc32c.extend(crc, bytes(raw[_SEAL.stop :]))


def _fields(header: EntryHeader) -> dict[str, Any]:
    key = header.key
    runs = [(pair, len(list(same))) for pair, same in groupby(header.layers)]
    return {
        "key": [key.fingerprint, key.namespace, key.chunk_id, key.encoding, *key.context],
        "start": header.start,
        "quantised": header.quantised,
        "layers": [[count, *_named(keys), *_named(values)] for (keys, values), count in runs],
        "crcs": "".join(map(_hex, header.crcs)),  # entries of one shape have the same size
        "sums": [[name, *_named(spec), _hex(crc)] for name, spec, crc in header.sums],
    }


def _named(spec: TensorShape) -> tuple[str, tuple[int, ...]]:
    return _NAMES[spec[0]], spec[1]


def _hex(crc: int) -> str:
    return f"{crc:08x}"


def _parsed(fields: Any) -> EntryHeader:
    fingerprint, namespace, chunk_id, encoding, *context = fields["key"]
    key = KVKey(fingerprint, namespace, chunk_id, encoding, tuple(context))
    key.digest()  # of strings alone, without lone surrogates
    layers: list[tuple[TensorShape, TensorShape]] = []
    for count, keys, keys_shape, values, values_shape in fields["layers"]:
        if not _is_count(count) or len(layers) + count > _MAX_LAYERS:
            raise ValueError("a bad number of layers")
        layers += [(_spec(keys, keys_shape), _spec(values, values_shape))] * count
    shapes = {spec[1] for pair in layers for spec in pair}
    if {len(shape) for shape in shapes} != {3} or len({shape[1] for shape in shapes}) != 1:
        raise ValueError("no layers of [kv_heads, tokens, head_dim] with the same tokens")
    sums = tuple((name, _spec(dtype, shape), int(crc, 16)) for name, dtype, shape, crc in fields["sums"])
    names = [name for name, *_ in sums]
    "".join(names).encode()
    crcs = struct.unpack(f">{len(layers)}I", bytes.fromhex(fields["crcs"]))
    start, quantised = fields["start"], fields["quantised"]
    if names != sorted(set(names)):
        raise ValueError("bad names of sums")
    if not (start is None or _is_count(start)) or type(quantised) is not str:
        raise ValueError("no start, or no kind of rounding")
    return EntryHeader(key, start, quantised, tuple(layers), crcs, sums)


def _is_count(number: object) -> bool:
    return type(number) is int and number >= 0  # True and 2.0 are equal to numbers, too


def _spec(dtype: str, shape: Sequence[int]) -> TensorShape:
    if not all(map(_is_count, shape)) or math.prod(n or 1 for n in shape) > _MAX_ELEMENTS:
        raise ValueError("a bad shape")
    return DTYPES[dtype], tuple(shape)


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
        self.sums: dict[str, torch.Tensor] = {}
        at = self._start + self.header.offsets[-1]
        for name, spec, crc in self.header.sums:
            raw = self._whole(at, nbytes_of(spec))
            if google_crc32c.value(raw.numpy()) != crc:
                raise EntryDamaged(f"{name} does not match its CRC")
            self.sums[name] = _tensor(raw, spec)
            at += len(raw)

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, in memory of their own."""
        return self._layers(number, number + 1)[0]

    def kv(self) -> ChunkKV:
        """The whole entry."""
        header = self.header
        step = max(1, _BATCH // max(1, header.offsets[1]))  # small layers are read several at a time
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for first in range(0, len(header.layers), step):
            pairs += self._layers(first, min(first + step, len(header.layers)))
        keys, values = zip(*pairs, strict=True)
        return ChunkKV.checked(keys, values, header.start, self.sums, header.quantised)

    def _layers(self, first: int, end: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        offsets, pairs = self.header.offsets, []
        raw = self._whole(self._start + offsets[first], offsets[end] - offsets[first])
        for number in range(first, end):
            layer = raw[offsets[number] - offsets[first] : offsets[number + 1] - offsets[first]]
            if google_crc32c.value(layer.numpy()) != self.header.crcs[number]:
                raise EntryDamaged(f"layer {number} does not match its CRC")
            keys, values = self.header.layers[number]
            middle = nbytes_of(keys)
            pairs.append((_tensor(layer[:middle], keys), _tensor(layer[middle:], values)))
        return pairs

    def _whole(self, offset: int, nbytes: int) -> torch.Tensor:
        raw = self._read(offset, nbytes)
        if len(raw) != nbytes:
            raise EntryDamaged("the entry ends early")
        return raw


class EntryFile(EntryReader):
    """An entry file, open until :meth:`close`; one that is evicted meanwhile can be read to its end.

    OSError if the file cannot be read; ``status`` is that of the file.
    """

    def __init__(self, file: OpenFile, key: KVKey | None = None) -> None:
        self._file = file
        super().__init__(self._pread, os.fstat(file.fd).st_size, key)

    def close(self) -> None:
        """Close the file; may be repeated."""
        self._file.close()

    def __enter__(self) -> EntryFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pread(self, offset: int, nbytes: int) -> torch.Tensor:
        try:
            raw = torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError as error:  # of torch
            raise OSError(errno.ENOMEM, f"no memory for {nbytes} bytes") from error
        view, done = raw.numpy().data, 0
        while done < nbytes:
            got = read_into(self._file.fd, view[done:], offset + done)
            if not got:
                break
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
    """The key in a file's verified header; the layers are not read.

    EntryDamaged if header, length or name are wrong, OSError if the file cannot be read.
    """
    with open_file(path) as file:
        key = EntryFile(file).header.key
    if entry_name(key) != path.name:
        raise EntryDamaged(f"{path.name} holds the entry of another key")
    return key


def decode_entry(raw: memoryview, key: KVKey) -> ChunkKV:
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
