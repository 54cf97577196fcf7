"""The entry file: any safetensors reader opens it, and no altered byte gets through."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from safetensors import safe_open

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.entry import (
    EntryDamaged,
    EntryHeader,
    EntryImage,
    Layout,
    TensorSpec,
    encode_header,
    read_key,
)
from ragcachekit.types import KVKey
from store_kit import KEY, contents, key_of, kv_of, read_entry


def written(folder: Path, key: KVKey, kv: ChunkKV) -> Path:
    path = folder / f"{key.digest()}.safetensors"
    image = EntryImage(key, kv)
    with path.open("wb") as file:
        image.write(file.fileno())
    assert path.stat().st_size == image.nbytes
    return path


def is_damaged(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    try:
        read_entry(path, KEY)
    except EntryDamaged:
        return True
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_reads_what_we_write(tmp_path: Path, dtype: torch.dtype) -> None:
    kv = kv_of(1, dtype=dtype, start=3)
    path = written(tmp_path, KEY, kv)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {"k.0", "k.1", "v.0", "v.1"}
        theirs = ChunkKV(
            tuple(file.get_tensor(f"k.{n}") for n in range(2)),
            tuple(file.get_tensor(f"v.{n}") for n in range(2)),
            3,
        )
        meta = file.metadata()
    assert contents(theirs) == contents(kv)
    assert meta["fingerprint"] == KEY.fingerprint
    assert meta["namespace"] == KEY.namespace
    assert meta["chunk_id"] == KEY.chunk_id
    assert meta["encoding"] == KEY.encoding
    assert (json.loads(meta["context"]), meta["start"]) == (["system", "neighbour"], "3")
    assert (meta["schema"], meta["quantised"]) == ("5", "")


def test_layers_may_differ_in_shape_and_type(tmp_path: Path) -> None:
    kv = ChunkKV(
        (torch.randn(1, 3, 1).to(torch.bfloat16), torch.randn(2, 3, 8)),
        (torch.randn(1, 3, 5), torch.randn(2, 3, 4).to(torch.float16)),
    )
    assert contents(read_entry(written(tmp_path, KEY, kv), KEY)) == contents(kv)


def test_attention_sums_come_back_and_are_sealed(tmp_path: Path) -> None:
    sums = {"attended": torch.arange(4.0), "by layer": torch.randn(2, 3)}
    kv = ChunkKV(kv_of(1).keys, kv_of(1).values, None, sums)
    path = written(tmp_path, KEY, kv)
    read = read_entry(path, KEY)
    assert contents(read) == contents(kv)
    assert sorted(read.sums) == sorted(sums)
    assert all(torch.equal(read.sums[name], tensor) for name, tensor in sums.items())
    raw = bytearray(path.read_bytes())
    for at in range(len(raw) - sum(t.nbytes for t in sums.values()), len(raw)):
        raw[at] ^= 1
        assert is_damaged(path, bytes(raw))
        raw[at] ^= 1


KINDS = {
    "small, all alike": kv_of(1),
    "large, all alike": kv_of(2, tokens=700, heads=8, width=64),
    "bf16": kv_of(3, dtype=torch.bfloat16),
    "fp8": kv_of(4).each(lambda tensor: tensor.to(torch.float8_e4m3fn)),
    "out of order": kv_of(5, tokens=8).each(lambda tensor: tensor.transpose(1, 2)),
    "large, out of order": kv_of(6, tokens=64, heads=90, width=64).each(lambda t: t.transpose(1, 2)),
    "learns": kv_of(7).each(lambda tensor: tensor.clone().requires_grad_()),
    "keys and values differ": ChunkKV(kv_of(8).keys, kv_of(9, heads=1).values),
    "layers differ": ChunkKV(
        kv_of(1).keys + kv_of(1, heads=3).keys, kv_of(2).values + kv_of(2, heads=3).values
    ),
}


@pytest.mark.parametrize("kv", KINDS.values(), ids=KINDS)
def test_every_kind_of_tensors_is_written_in_order_and_sealed(tmp_path: Path, kv: ChunkKV) -> None:
    """Layer by layer, keys first, and beside each layer the CRC of all up to its end."""
    layers = [
        b"".join(bytes(t.detach().contiguous().view(torch.uint8).numpy()) for t in pair)
        for pair in zip(kv.keys, kv.values, strict=True)
    ]
    path = written(tmp_path, KEY, kv)
    data = path.read_bytes()
    assert data.endswith(b"".join(layers))
    length = int.from_bytes(data[:8], "little")
    assert 8 + length + sum(map(len, layers)) == len(data)
    meta = json.loads(data[8 : 8 + length])["__metadata__"]
    running = [google_crc32c.value(b"".join(layers[: n + 1])) for n in range(len(layers))]
    assert meta["running_crc32c"] == "".join(f"{crc:08x}" for crc in running)
    assert contents(read_entry(path, KEY)) == contents(kv.each(torch.Tensor.detach))


@pytest.mark.parametrize(
    "shapes", [((2, 3, 8), (2, 4, 8)), ((2, 3), (2, 3)), ((2, 3, 8, 1), (2, 3, 8, 1))], ids=str
)
def test_a_whole_header_that_describes_no_chunk_kv_is_damage(tmp_path: Path, shapes: Any) -> None:
    layout = Layout(((1, *(TensorSpec(torch.uint8, shape) for shape in shapes)),))
    body = bytes(layout.nbytes)
    header = encode_header(EntryHeader(KEY, None, layout, (google_crc32c.value(body),)))
    with pytest.raises(EntryDamaged, match="schema"):
        read_key(written_raw(tmp_path, header + body))


def written_raw(folder: Path, data: bytes) -> Path:
    path = folder / f"{KEY.digest()}.safetensors"
    path.write_bytes(data)
    return path


def test_no_tokens(tmp_path: Path) -> None:
    kv = kv_of(1, tokens=0)
    assert contents(read_entry(written(tmp_path, KEY, kv), KEY)) == contents(kv)


def test_names_beyond_ascii(tmp_path: Path) -> None:
    key = KVKey("f", 'münchen/"docs"\n\0', "✓", context=("𝕏",))
    path = written(tmp_path, key, kv_of(1))
    assert contents(read_entry(path, key)) == contents(kv_of(1))
    assert read_key(path) == key


def test_a_flipped_bit_in_any_byte_is_found(tmp_path: Path) -> None:
    """Two bits of every byte, header included; bit 5 changes the case of hex digits and JSON letters."""
    path = written(tmp_path, KEY, kv_of(1, tokens=1, heads=1, width=4))
    good = path.read_bytes()
    rng = random.Random(3)
    missed = []
    with path.open("r+b", buffering=0) as file:  # in place: writing the whole file each time is slow
        for place, byte in enumerate(good):
            for bit in (5, rng.choice((0, 1, 2, 3, 4, 6, 7))):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), place)
                try:
                    read_entry(path, KEY)
                except EntryDamaged:
                    continue
                missed.append((place, bit))
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert missed == []
    assert path.read_bytes() == good


def test_random_damage_of_a_larger_file_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, KEY, kv_of(1, tokens=64, layers=6))
    good = path.read_bytes()
    rng = random.Random(7)
    for _ in range(200):
        start = rng.randrange(len(good))
        length = rng.randint(1, 600)
        noise = rng.randbytes(min(length, len(good) - start))
        bad = good[:start] + noise + good[start + len(noise) :]
        assert bad == good or is_damaged(path, bad), (start, length)


def test_every_truncation_and_every_addition_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, KEY, kv_of(1, tokens=1, heads=1, width=4))
    good = path.read_bytes()
    assert is_damaged(path, good + b"\0")
    assert is_damaged(path, good + good)
    assert not is_damaged(path, good)
    for length in reversed(range(len(good))):
        os.truncate(path, length)
        with pytest.raises(EntryDamaged):
            read_entry(path, KEY)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_absurd_header_lengths(tmp_path: Path, length: int) -> None:
    assert is_damaged(tmp_path / "entry", length.to_bytes(8, "little") + b"{}" * 100)


def test_layers_of_two_entries_cannot_be_mixed(tmp_path: Path) -> None:
    ours, theirs = (written(tmp_path, KEY, kv_of(seed)).read_bytes() for seed in (1, 2))
    assert is_damaged(tmp_path / "mixed", ours[:-100] + theirs[-100:])


@pytest.mark.parametrize(
    "other",
    [
        KVKey("other", KEY.namespace, KEY.chunk_id, KEY.encoding, KEY.context),
        KVKey(KEY.fingerprint, "other", KEY.chunk_id, KEY.encoding, KEY.context),
        KVKey(KEY.fingerprint, KEY.namespace, "other", KEY.encoding, KEY.context),
        KVKey(KEY.fingerprint, KEY.namespace, KEY.chunk_id, "other", KEY.context),
        KVKey(KEY.fingerprint, KEY.namespace, KEY.chunk_id, KEY.encoding, ("other",)),
    ],
)
def test_a_whole_file_under_another_name_is_damage(tmp_path: Path, other: KVKey) -> None:
    path = written(tmp_path, KEY, kv_of(1))
    renamed = path.rename(tmp_path / f"{other.digest()}.safetensors")
    with pytest.raises(EntryDamaged, match="another key"):
        read_entry(renamed, other)
    with pytest.raises(EntryDamaged, match="another key"):
        read_key(renamed)


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    path = written(tmp_path, KEY, kv_of(1))
    link = tmp_path / "link"
    os.symlink(path, link)
    with pytest.raises(OSError, match="link"):
        read_entry(link, KEY)


def test_a_type_that_cannot_be_stored_is_refused() -> None:
    with pytest.raises(TypeError, match=r"complex64.*cast it"):
        EntryImage(key_of(1), kv_of(1, dtype=torch.complex64))


def test_reading_changes_no_byte(tmp_path: Path) -> None:
    path = written(tmp_path, KEY, kv_of(1))
    before = path.read_bytes()
    for _ in range(3):
        read_entry(path, KEY)
    assert path.read_bytes() == before
