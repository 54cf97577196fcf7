"""One entry as bytes: any safetensors reader opens it, and no altered byte gets through."""

import copy
import json
import os
import random
from typing import Any

import google_crc32c
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.disk import verify
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


# -- damage ----------------------------------------------------------------------------------------------


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


# -- headers that nobody wrote, under a CRC that is right ------------------------------------------------


def crafted(text, body):
    """An entry with this JSON as its header, and a CRC that is right for it."""
    header = text.encode().replace(b"00000000", b"%08x" % google_crc32c.value(text.encode()), 1)
    header += b" " * (-(8 + len(header)) % 64)
    return len(header).to_bytes(8, "little") + header + body


def sealed(entry, tensors, body, schema=SCHEMA):
    text = entry if isinstance(entry, str) else json.dumps(entry, separators=(",", ":"))
    fields = {"__metadata__": {"crc32c": "0" * 8, "schema": schema, "entry": text}, **tensors}
    return crafted(json.dumps(fields, separators=(",", ":")), body)


def is_a_miss(folder, image, key):
    """Through every method that reads headers, with an entry beside it that must not be touched."""
    store, path = opened(folder), file_of(folder, key)
    assert store.put(key_of(7), kv_of(7))
    for ask in (store.get, store.open):
        path.write_bytes(image)
        assert ask(key) is None
        assert not path.exists()
    path.write_bytes(image)
    assert list(verify(folder).damaged) == [path.name]
    assert store.forget(key.namespace, frozenset({"nothing"})) == 1
    assert not path.exists()
    assert holds(store, 7)
    store.close()
    assert decoded(image, key) is None


def tensor(shape, start=0, end=256, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


BODY = bytes(512)
CRC = f"{google_crc32c.value(BODY):08x}"
KEY_LIST = ["weights-1", "acme/docs", "chunk-1", "standalone"]
ENTRY = {"key": KEY_LIST, "start": None, "quantised": "", "crcs": CRC}
VALUES_OF_0 = {"v.0": tensor([2, 4, 8], 256, 512)}
TENSORS = {"k.0": tensor([2, 4, 8]), **VALUES_OF_0}
"""Two tensors ``[2, 4, 8]`` of zeros in float32."""


def keys_of(shape):
    return {"k.0": tensor(shape), **VALUES_OF_0}


def with_sums(*shapes, names="ab"):
    sums = {f"sums.{name}": tensor(shape, 512, 512) for name, shape in zip(names, shapes, strict=False)}
    return {**ENTRY, "crcs": CRC + "0" * 8 * len(sums)}, {**TENSORS, **sums}, BODY


HUGE = 2**31 - 1
CASES: dict[str, tuple[Any, Any, bytes]] = {
    "float dims": (ENTRY, keys_of([2.0, 4, 8]), BODY),
    "bool dims": (ENTRY, {"k.0": tensor([True, 4, 8], 0, 128), "v.0": tensor([3, 4, 8], 128, 512)}, BODY),
    "negative dims": (ENTRY, keys_of([-2, 4, -8]), BODY),
    "string shape": (ENTRY, keys_of("abc"), BODY),
    "infinite dims": (ENTRY, keys_of([float("inf"), 4, 8]), BODY),
    "two dims": (ENTRY, {"k.0": tensor([8, 8]), "v.0": tensor([8, 8], 256, 512)}, BODY),
    "tokens differ": (ENTRY, {"k.0": tensor([2, 4, 8]), "v.0": tensor([1, 8, 8], 256, 512)}, BODY),
    "sizes that overflow": (
        {**ENTRY, "crcs": "0" * 8},
        {"k.0": tensor([HUGE, 0, HUGE], 0, 0), "v.0": tensor([HUGE, 0, HUGE], 0, 0)},
        b"",
    ),
    "sums that overflow": with_sums([HUGE] * 4 + [0]),
    "no layers": ({**ENTRY, "crcs": ""}, {}, b""),
    "no values": (ENTRY, {"k.0": TENSORS["k.0"]}, BODY[:256]),
    "other offsets": (ENTRY, {"k.0": tensor([2, 4, 8], 0, 255), **VALUES_OF_0}, BODY),
    "another order": (ENTRY, {"v.0": tensor([2, 4, 8]), "k.0": tensor([2, 4, 8], 256, 512)}, BODY),
    "another tensor": (ENTRY, {**TENSORS, "x": tensor([0], 512, 512)}, BODY),
    "a crc too few": ({**ENTRY, "crcs": ""}, TENSORS, BODY),
    "crc a number": ({**ENTRY, "crcs": 7}, TENSORS, BODY),
    "crc no hex": ({**ENTRY, "crcs": "x" * 8}, TENSORS, BODY),
    "sums out of order": with_sums([0], [0], names="ba"),
    "surrogate name": with_sums([0], names="\ud800"),
    "unknown dtype": (ENTRY, {"k.0": tensor([2, 4, 8], dtype="F99"), **VALUES_OF_0}, BODY),
    "deep": ("[" * 200_000, TENSORS, BODY),
    "a list": ("[]", TENSORS, BODY),
    "key of numbers": ({**ENTRY, "key": ["weights-1", 7, "chunk-1", "standalone"]}, TENSORS, BODY),
    "short key": ({**ENTRY, "key": ["weights-1"]}, TENSORS, BODY),
    "surrogate key": ({**ENTRY, "key": ["weights-1", "\ud800", "chunk-1", "standalone"]}, TENSORS, BODY),
    "negative start": ({**ENTRY, "start": -1}, TENSORS, BODY),
    "start false": ({**ENTRY, "start": False}, TENSORS, BODY),
    "quantised a list": ({**ENTRY, "quantised": []}, TENSORS, BODY),
}


@pytest.mark.parametrize(("entry", "tensors", "body"), CASES.values(), ids=CASES)
def test_a_crafted_header_is_a_miss(tmp_path, entry, tensors, body):
    assert decoded(sealed(ENTRY, TENSORS, BODY), key_of(1)) is not None, "the frame itself is right"
    is_a_miss(tmp_path, sealed(entry, tensors, body), key_of(1))


@pytest.mark.parametrize(
    "text",
    [
        '{"__metadata__":{"crc32c":"00000000"}}',
        '{"__metadata__":{"crc32c":"00000000","x":' + "[" * 200_000,
        '{"__metadata__":{"crc32c":"00000000","schema":"7"},"k.0":7}',
    ],
)
def test_metadata_without_an_entry_is_a_miss(tmp_path, text):
    is_a_miss(tmp_path, crafted(text, BODY), key_of(1))


def test_an_entry_of_another_schema_is_a_miss(tmp_path):
    is_a_miss(tmp_path, sealed(ENTRY, TENSORS, BODY, "6"), key_of(1))


def places(value, path=()):
    """Where something stands in nested data."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for name, item in inside for place in places(item, (*path, name)))]


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 9), st.floats(), st.text(max_size=4),
    st.sampled_from(["\ud800", "F16", "F32", "NaN", "", "0", -1, 2**31, 2**63, 10**30]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_mutated_header_under_a_new_crc_is_a_miss_or_an_entry(tmp_path, data):
    """Whoever makes a right CRC may write another entry, but never one that is read in another shape."""
    image = image_of(KEY, KV)
    end = 8 + int.from_bytes(image[:8], "little")
    tensors = json.loads(image[8:end])
    entry = json.loads(tensors.pop("__metadata__")["entry"])
    mutated = {"entry": copy.deepcopy(entry), "tensors": copy.deepcopy(tensors)}
    place = data.draw(st.sampled_from([p for p in places(mutated) if len(p) > 1]), "place")
    owner: Any = mutated
    for step in place[:-1]:
        owner = owner[step]
    how = data.draw(st.sampled_from(["value", "nest", "remove", "double"]), "how")
    if how == "nest":
        owner[place[-1]] = [owner[place[-1]]]
    elif how == "remove":
        del owner[place[-1]]
    elif how == "double" and isinstance(owner, list):
        owner.insert(place[-1], owner[place[-1]])
    else:
        owner[place[-1]] = data.draw(VALUES, "value")
    remade = sealed(mutated["entry"], mutated["tensors"], image[end:])
    found = decoded(remade, KEY)
    if found is not None:
        assert contents(found)[1:] == contents(KV)[1:], "only start and kind can differ"
    elif json.dumps({**mutated["entry"], "crcs": 0}) != json.dumps({**entry, "crcs": 0}):
        is_a_miss(tmp_path, remade, KEY)
