"""The header of an entry file: a safetensors header with the entry's key in its metadata, and a CRC.

The CRC comes first, at a fixed place, and is checked before any JSON is parsed. The safetensors library
writes metadata in no fixed order, so the header is encoded here; any safetensors reader opens the files.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import google_crc32c

from ragcachekit.errors import StoreError
from ragcachekit.files import parse_json
from ragcachekit.store.entry.layout import NAMES, Layout, TensorSpec, read_layout, spec_of
from ragcachekit.types import KVKey

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
