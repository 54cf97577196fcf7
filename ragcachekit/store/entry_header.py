"""The header of an entry file: a safetensors header that also says whose KV this is, sealed by a CRC.

A safetensors file is eight bytes of header length, a JSON header, then raw tensors. Ours starts with
``__metadata__`` and in it ``header_crc32c``, so that the seal stands at a fixed place and is checked
before any JSON is parsed. (The safetensors library writes metadata in no fixed order, which is why the
header is put together here; any safetensors reader opens the files.)
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import google_crc32c
import torch

from ragcachekit.errors import StoreError
from ragcachekit.types import KVKey

SCHEMA = "3"
_ALIGN = 64  # tensors start on a cache line
_LENGTH_BYTES = 8
_SUMS = "sums."
_MAX_HEADER = 100_000_000  # as the safetensors library
_OPENING = b'{"__metadata__":{"header_crc32c":"'
_SEAL = slice(_LENGTH_BYTES + len(_OPENING), _LENGTH_BYTES + len(_OPENING) + 8)
_METADATA = len('{"__metadata__":')
_NO_SEAL = b"00000000"
_JSON = json.JSONDecoder()

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class EntryDamaged(StoreError):
    """A file of the disk tier is cut short, altered, or not the entry that its name promises.

    ``seen`` is which file that was, where it was one.
    """

    seen: os.stat_result | None = None


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of one stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the raw tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of ``tensor``; TypeError for a dtype that safetensors does not know."""
        if tensor.dtype not in _NAMES:
            raise TypeError(
                f"KV of {tensor.dtype} cannot be stored; cast it to one of {', '.join(map(str, _NAMES))}"
            )
        return cls(tensor.dtype, tuple(tensor.shape))


class LayerSpec(NamedTuple):
    """Keys and values of one layer, with the CRC32C of their raw bytes, keys first."""

    keys: TensorSpec
    values: TensorSpec
    crc32c: int

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True)
class SealedSpec:
    """One named tensor by itself, with the CRC32C of its raw bytes."""

    name: str
    tensor: TensorSpec
    crc32c: int

    @property
    def nbytes(self) -> int:
        """Bytes of the raw tensor."""
        return self.tensor.nbytes


@dataclass(frozen=True)
class EntryHeader:
    """All that an entry file says before its tensors.

    ``start`` is that of :class:`~ragcachekit.model.kv.ChunkKV`; so are ``quantised`` and ``sums``, whose
    tensors stand behind the layers in the order of their names.
    """

    key: KVKey
    start: int | None
    layers: tuple[LayerSpec, ...]
    sums: tuple[SealedSpec, ...] = ()
    quantised: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(s.nbytes for s in self.layers) + sum(s.nbytes for s in self.sums)


def encode_header(header: EntryHeader) -> bytes:
    """Length prefix and sealed JSON, padded with spaces to whole cache lines."""
    content = {"__metadata__": _metadata(header), **_tensors(header)}
    text = json.dumps(content, separators=(",", ":")).encode()
    size = _LENGTH_BYTES + len(text)
    text += b" " * (-size % _ALIGN)
    raw = bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
    raw[_SEAL] = _seal(bytes(raw))
    return bytes(raw)


def header_size(prefix: bytes, file_size: int) -> int:
    """Bytes of the whole header, from the first eight bytes of a file of ``file_size`` bytes."""
    length = int.from_bytes(prefix, "little")
    size = _LENGTH_BYTES + length
    if len(prefix) < _LENGTH_BYTES or size > file_size or not len(_OPENING) < length <= _MAX_HEADER:
        raise EntryDamaged(f"a header of {length} bytes in a file of {file_size}")
    return size


def decode_header(raw: bytes) -> EntryHeader:
    """The reverse of :func:`encode_header`; EntryDamaged unless every byte is as it was written."""
    # The text is compared, not the number: "A" for "a" is a flipped bit too.
    if raw[_SEAL] != _seal(raw):
        raise EntryDamaged("the header does not match its CRC")
    try:
        # The object of ``__metadata__`` alone: what follows it says the same of each tensor at length.
        return _parse(_JSON.raw_decode(raw[_LENGTH_BYTES:].decode(), _METADATA)[0])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EntryDamaged(f"a header of another schema: {error!r}") from error


def _seal(raw: bytes) -> bytes:
    """The seal of a header, whatever stands in its place now."""
    crc = google_crc32c.value(raw[: _SEAL.start] + _NO_SEAL)
    return b"%08x" % google_crc32c.extend(crc, raw[_SEAL.stop :])


def _metadata(header: EntryHeader) -> dict[str, str]:
    key = header.key
    return {
        "header_crc32c": _NO_SEAL.decode(),
        "schema": SCHEMA,
        "fingerprint": key.fingerprint,
        "namespace": key.namespace,
        "chunk_id": key.chunk_id,
        "encoding": key.encoding,
        "quantised": header.quantised,
        "content": json.dumps(_content(header)),
    }


def _content(header: EntryHeader) -> dict[str, object]:
    """Also what safetensors wants to know of each tensor, but short: a read parses this alone."""
    return {
        "context": header.key.context,
        "start": header.start,
        "layers": [[len(list(same)), *pair] for pair, same in groupby(map(_pair, header.layers))],
        "layer_crc32c": [layer.crc32c for layer in header.layers],
        "sums": [[spec.name, *_plain(spec.tensor), spec.crc32c] for spec in header.sums],
    }


def _pair(layer: LayerSpec) -> tuple[object, ...]:
    return (*_plain(layer.keys), *_plain(layer.values))


def _plain(spec: TensorSpec) -> tuple[object, ...]:
    return _NAMES[spec.dtype], spec.shape


def _tensors(header: EntryHeader) -> dict[str, Any]:
    specs = [
        (name, spec)
        for number, layer in enumerate(header.layers)
        for name, spec in ((f"k.{number}", layer.keys), (f"v.{number}", layer.values))
    ]
    specs += [(_SUMS + spec.name, spec.tensor) for spec in header.sums]
    entries = {}
    offset = 0
    for name, spec in specs:
        offsets = [offset, offset + spec.nbytes]
        entries[name] = {"dtype": _NAMES[spec.dtype], "shape": spec.shape, "data_offsets": offsets}
        offset += spec.nbytes
    return entries


def _parse(meta: dict[str, str]) -> EntryHeader:
    if meta["schema"] != SCHEMA:
        raise ValueError(f"schema {meta['schema']}, this version reads {SCHEMA}")
    content = json.loads(meta["content"])
    context = tuple(content["context"])
    key = KVKey(meta["fingerprint"], meta["namespace"], meta["chunk_id"], meta["encoding"], context)
    layers = _layers(content["layers"], content["layer_crc32c"])
    if not layers or {len(s.shape) for layer in layers for s in (layer.keys, layer.values)} != {3}:
        raise ValueError("no layers of [kv_heads, tokens, head_dim]")
    sums = tuple(
        SealedSpec(name, TensorSpec(_DTYPES[dtype], tuple(shape)), crc)
        for name, dtype, shape, crc in content["sums"]
    )
    return EntryHeader(key, content["start"], layers, sums, meta["quantised"])


def _layers(groups: list[list[Any]], crcs: list[int]) -> tuple[LayerSpec, ...]:
    pairs = []
    for count, keys_dtype, keys_shape, values_dtype, values_shape in groups:
        keys = TensorSpec(_DTYPES[keys_dtype], tuple(keys_shape))
        values = TensorSpec(_DTYPES[values_dtype], tuple(values_shape))
        pairs += [(keys, values)] * count
    return tuple(LayerSpec(*pair, crc) for pair, crc in zip(pairs, crcs, strict=True))
