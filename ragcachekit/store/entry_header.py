"""The header of an entry file: a safetensors header that also says whose KV this is, sealed by a CRC.

A safetensors file is eight bytes of header length, a JSON header, then raw tensors. Ours starts with
``__metadata__`` and in it ``header_crc32c``, so that the seal stands at a fixed place and is checked
before any JSON is parsed. (The safetensors library writes metadata in no fixed order, which is why the
header is put together here; any safetensors reader opens the files.)
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c

from ragcachekit.errors import StoreError
from ragcachekit.files import parse_json
from ragcachekit.store.entry_layout import NAMES, Layout, TensorSpec, spec_of
from ragcachekit.types import KVKey

SCHEMA = "5"
_ALIGN = 64  # tensors start on a cache line
_LENGTH_BYTES = 8
_SUMS = "sums."
_FIELDS = 12  # of the metadata
_MAX_HEADER = 100_000_000  # as the safetensors library
_OPENING = b'{"__metadata__":{"header_crc32c":"'
_SEAL = slice(_LENGTH_BYTES + len(_OPENING), _LENGTH_BYTES + len(_OPENING) + 8)
_CRCS = _SEAL.stop + len('","running_crc32c":"')
_METADATA = len('{"__metadata__":')
_NO_SEAL = b"00000000"
_NOTHING = "[]"
_HEX = 8  # digits of a CRC32C
_COMPACT = json.JSONEncoder(separators=(",", ":")).encode
_JSON = json.JSONDecoder()


class EntryDamaged(StoreError):
    """A file of the disk tier is cut short, altered, or not the entry that its name promises.

    ``seen`` is which file that was, where it was one.
    """

    seen: os.stat_result | None = None


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


class EntryHeader(NamedTuple):
    """All that an entry file says before its tensors.

    ``crcs``: for each layer, the CRC32C of the raw bytes of all layers up to its end. So each layer can
    be checked by itself, going on from the one before, and any stretch of layers in one step. ``start``
    is that of :class:`~ragcachekit.model.kv.ChunkKV`; so are ``quantised`` and ``sums``, whose tensors
    stand behind the layers in the order of their names.
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
    """Length prefix and sealed JSON, padded with spaces to whole cache lines."""
    entries = [header.layout.entries, *_sums_entries(header)]
    text = f'{{"__metadata__":{_COMPACT(_metadata(header))},{",".join(entries)}}}'.encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGN)
    raw = bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
    raw[_SEAL] = _seal(raw)
    return raw


def set_crcs(raw: bytearray, crcs: Sequence[int]) -> None:
    """Put those of the layers into an encoded header, which was made before they were known."""
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

    The CRC guards against faults alone: anybody who may write into the folder can put a right one over a
    header of his own. So whatever the header says is checked, too, and has to say it as we write it.
    """
    # The text is compared, not the number: "A" for "a" is a flipped bit too.
    if raw[_SEAL] != _seal(raw):
        raise EntryDamaged("the header does not match its CRC")
    try:
        # The object of ``__metadata__`` alone: what follows it says the same of each tensor at length.
        return _parse(_JSON.raw_decode(raw[_LENGTH_BYTES:].decode(), _METADATA)[0])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, struct.error) as error:
        raise EntryDamaged(f"a header of another schema: {error!r:.200}") from error


def _seal(raw: bytes | bytearray) -> bytes:
    """The seal of a header, whatever stands in its place now."""
    crc = google_crc32c.value(bytes(raw[: _SEAL.start]) + _NO_SEAL)
    return b"%08x" % google_crc32c.extend(crc, bytes(raw[_SEAL.stop :]))


def _metadata(header: EntryHeader) -> dict[str, str]:
    """Strings alone, as safetensors wants it; a read parses this and nothing else."""
    key = header.key
    return {
        "header_crc32c": _NO_SEAL.decode(),
        "running_crc32c": _crcs_text(header.crcs),
        "schema": SCHEMA,
        "fingerprint": key.fingerprint,
        "namespace": key.namespace,
        "chunk_id": key.chunk_id,
        "encoding": key.encoding,
        "context": _COMPACT(key.context) if key.context else _NOTHING,
        "start": "" if header.start is None else str(header.start),
        "quantised": header.quantised,
        "layers": header.layout.text,
        "sums": _described(header.sums) if header.sums else _NOTHING,
    }


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
    context, start, sums, crcs = meta["context"], meta["start"], meta["sums"], meta["running_crc32c"]
    layout = Layout.read(meta["layers"])
    raw = bytes.fromhex(crcs)
    if len(crcs) != _HEX * layout.layers or raw.hex() != crcs:
        raise ValueError("layers without CRC")
    if len(meta) != _FIELDS:
        raise ValueError("more than belongs into a header")
    return EntryHeader(
        KVKey(
            *(meta["fingerprint"], meta["namespace"], meta["chunk_id"], meta["encoding"]),
            () if context == _NOTHING else _context(context),
        ),
        _start(start) if start else None,
        layout,
        struct.unpack(f">{layout.layers}I", raw),
        () if sums == _NOTHING else _sums(sums),
        meta["quantised"],
    )


def _start(text: str) -> int:
    start = int(text)
    if start < 0 or str(start) != text:
        raise ValueError("a start that nobody wrote")
    return start


def _context(text: str) -> tuple[str, ...]:
    context = tuple(parse_json(text))
    "".join(context).encode()  # as above: their text may hold escapes
    if _COMPACT(context) != text:
        raise ValueError("a context that nobody wrote")
    return context


def _described(sums: tuple[SealedSpec, ...]) -> str:
    return _COMPACT([[spec.name, NAMES[spec.tensor.dtype], spec.tensor.shape, spec.crc32c] for spec in sums])


def _sums(text: str) -> tuple[SealedSpec, ...]:
    sums = tuple(SealedSpec(name, spec_of(dtype, shape), crc) for name, dtype, shape, crc in parse_json(text))
    names = [spec.name for spec in sums]
    "".join(names).encode()
    if (
        {type(spec.crc32c) for spec in sums} != {int}
        or names != sorted(set(names))
        or _described(sums) != text
    ):
        raise ValueError("sums that nobody wrote")
    return sums
