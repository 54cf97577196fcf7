"""One entry as bytes: any safetensors reader opens it, and no altered byte gets through."""

import json
import os
import random

import google_crc32c
import pytest
import torch
from safetensors import safe_open

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.entry import SCHEMA, EntryDamaged, decode_entry, encode_entry, entry_name, read_key
from ragcachekit.types import KVKey
from store_kit import KEY, contents, file_of, holds, key_of, kv_of, opened, read_entry

SUMS = {"attended": torch.arange(4.0), "inter": torch.arange(6.0).reshape(2, 3)}
KV = ChunkKV(kv_of(1).keys + kv_of(2, heads=3).keys, kv_of(3).values + kv_of(4, heads=3).values, 3, SUMS)


def image_of(key, kv):
    return b"".join(encode_entry(key, kv))


def written(folder, key, kv):
    path = folder / entry_name(key)
    path.write_bytes(image_of(key, kv))
    return path


def decoded(image, key=KEY):
    """What the bytes give where they are not in a file; None for damage."""
    try:
        return decode_entry(memoryview(image), key)
    except EntryDamaged:
        return None


def is_damaged(path, data):
    path.write_bytes(data)
    try:
        read_entry(path, KEY)
    except EntryDamaged:
        return decoded(data) is None
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_reads_what_we_write(tmp_path, dtype):
    kv = kv_of(1, dtype=dtype, start=3)
    with safe_open(written(tmp_path, KEY, kv), framework="pt") as file:
        assert set(file.keys()) == {"k.0", "k.1", "v.0", "v.1"}
        theirs = ChunkKV(
            tuple(file.get_tensor(f"k.{n}") for n in range(2)),
            tuple(file.get_tensor(f"v.{n}") for n in range(2)),
            3,
        )
        meta = file.metadata()
    assert contents(theirs) == contents(kv)
    assert meta["schema"] == SCHEMA
    entry = json.loads(meta["entry"])
    assert entry["key"] == [KEY.fingerprint, KEY.namespace, KEY.chunk_id, KEY.encoding, *KEY.context]
    assert (entry["start"], entry["quantised"]) == (3, "")


KINDS = {
    "small, all alike": kv_of(1),
    "large, all alike": kv_of(2, tokens=700, heads=8, width=64),
    "bf16": kv_of(3, dtype=torch.bfloat16),
    "fp8": kv_of(4).each(lambda tensor: tensor.to(torch.float8_e4m3fn)),
    "out of order": kv_of(5, tokens=8).each(lambda tensor: tensor.transpose(1, 2)),
    "learns": kv_of(7).each(lambda tensor: tensor.clone().requires_grad_()),
    "no tokens": kv_of(1, tokens=0),
    "layers differ in shape and type": ChunkKV(
        (torch.randn(1, 3, 1).to(torch.bfloat16), torch.randn(2, 3, 8)),
        (torch.randn(1, 3, 5), torch.randn(2, 3, 4).to(torch.float16)),
    ),
}


@pytest.mark.parametrize("kv", KINDS.values(), ids=KINDS)
def test_every_kind_of_tensors_is_written_in_order_and_sealed(tmp_path, kv):
    """Layer by layer, keys first, and a CRC of each layer."""
    layers = [
        b"".join(bytes(t.detach().contiguous().view(torch.uint8).numpy()) for t in pair)
        for pair in zip(kv.keys, kv.values, strict=True)
    ]
    data = image_of(KEY, kv)
    assert data.endswith(b"".join(layers))
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 64 == 0
    assert 8 + length + sum(map(len, layers)) == len(data)
    entry = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["entry"])
    assert entry["crcs"] == "".join(f"{google_crc32c.value(layer):08x}" for layer in layers)
    plain = kv.each(torch.Tensor.detach)
    assert contents(read_entry(written(tmp_path, KEY, kv), KEY)) == contents(plain)
    assert contents(decode_entry(memoryview(data), KEY)) == contents(plain)


def test_sums_come_back_and_are_sealed(tmp_path):
    path = written(tmp_path, KEY, KV)
    for read in (read_entry(path, KEY), decode_entry(memoryview(path.read_bytes()), KEY)):
        assert contents(read) == contents(KV)
        assert sorted(read.sums) == sorted(SUMS)
        assert all(torch.equal(read.sums[name], tensor) for name, tensor in SUMS.items())
    raw = bytearray(path.read_bytes())
    for at in range(len(raw) - sum(t.nbytes for t in SUMS.values()), len(raw)):
        raw[at] ^= 1
        assert is_damaged(path, bytes(raw))
        raw[at] ^= 1


def test_a_type_that_cannot_be_stored_is_refused():
    with pytest.raises(TypeError, match=r"complex64.*cast it"):
        encode_entry(key_of(1), kv_of(1, dtype=torch.complex64))


def test_a_flipped_bit_in_any_byte_is_found(tmp_path):
    """Two bits of every byte, header included; bit 5 changes the case of hex digits and JSON letters."""
    path = written(tmp_path, KEY, kv_of(1, tokens=1, heads=1, width=4))
    good, rng, missed = path.read_bytes(), random.Random(3), []
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


def test_noise_cuts_and_additions_are_found(tmp_path):
    path, rng = written(tmp_path, KEY, kv_of(1, tokens=64, layers=6)), random.Random(7)
    good = path.read_bytes()
    for _ in range(150):
        start = rng.randrange(len(good))
        noise = rng.randbytes(min(rng.randint(1, 600), len(good) - start))
        if noise != good[start : start + len(noise)]:
            assert is_damaged(path, good[:start] + noise + good[start + len(noise) :])
    for end in [0, 1, 7, 8, 9, 60, 200, len(good) - 1, *rng.sample(range(len(good)), 30)]:
        assert is_damaged(path, good[:end])
    assert is_damaged(path, good + b"\0")
    assert is_damaged(path, good[:-100] + image_of(KEY, kv_of(2, tokens=64, layers=6))[-100:])


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_absurd_header_lengths(tmp_path, length):
    assert is_damaged(tmp_path / "entry", length.to_bytes(8, "little") + b"{}" * 100)


@pytest.mark.parametrize("field", ["fingerprint", "namespace", "chunk_id", "encoding", "context"])
def test_a_whole_file_under_another_name_is_damage(tmp_path, field):
    other = KVKey(**{**vars(KEY), field: ("other",) if field == "context" else "other"})
    renamed = written(tmp_path, KEY, kv_of(1)).rename(tmp_path / entry_name(other))
    with pytest.raises(EntryDamaged, match="another key"):
        read_entry(renamed, other)
    with pytest.raises(EntryDamaged, match="another key"):
        read_key(renamed)
    with pytest.raises(EntryDamaged, match="another key"):
        decode_entry(memoryview(image_of(KEY, kv_of(1))), other)


def crafted(text, body):
    """An entry with this JSON as its header, and a CRC that is right for it."""
    header = text.encode().replace(b"00000000", b"%08x" % google_crc32c.value(text.encode()), 1)
    header += b" " * (-(8 + len(header)) % 64)
    return len(header).to_bytes(8, "little") + header + body


def is_a_miss(folder, image, key):
    """Through every method that reads headers, with an entry beside it that must not be touched."""
    store, path = opened(folder), file_of(folder, key)
    assert store.put(key_of(7), kv_of(7))
    for ask in (store.get, store.open):
        path.write_bytes(image)
        assert ask(key) is None
        assert not path.exists()
    path.write_bytes(image)
    assert store.forget(key.namespace, frozenset({"nothing"})) == 1
    assert not path.exists()
    assert holds(store, 7)
    store.close()
    assert decoded(image, key) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"__metadata__":{"crc32c":"00000000"}}',
        '{"__metadata__":{"crc32c":"00000000","x":' + "[" * 200_000,
        '{"__metadata__":{"crc32c":"00000000","schema":"7"},"k.0":7}',
    ],
)
def test_metadata_without_an_entry_is_a_miss(tmp_path, text):
    is_a_miss(tmp_path, crafted(text, bytes(512)), key_of(1))


def test_an_entry_of_another_schema_is_a_miss(tmp_path):
    image = image_of(key_of(1), kv_of(1))
    end = 8 + int.from_bytes(image[:8], "little")
    fields = json.loads(image[8:end])
    assert fields["__metadata__"]["schema"] == SCHEMA
    for schema, other in ((SCHEMA, False), ("6", True)):
        fields["__metadata__"].update(crc32c="0" * 8, schema=schema)
        made = crafted(json.dumps(fields, separators=(",", ":")), image[end:])
        assert (decoded(made, key_of(1)) is None) == other
        if other:
            is_a_miss(tmp_path, made, key_of(1))
