"""Headers that nobody wrote under a CRC that is right: each is a miss in every way in."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.disk_check import verify
from ragcachekit.store.entry import Buffers, EntryDamaged, EntryImage, from_bytes, key_in
from ragcachekit.types import KVKey
from store_kit import contents, file_of, holds, key_of, kv_of, opened

KEY = KVKey("weights-1", "acme/docs", "chunk-1", "sinks:4", ("system", "neighbour"))
SUMS = {"attended": torch.arange(4.0), "inter": torch.arange(6.0).reshape(2, 3)}
KV = ChunkKV(kv_of(1).keys + kv_of(2, heads=3).keys, kv_of(3).values + kv_of(4, heads=3).values, 3, SUMS)
NESTED = ("context", "layers", "sums")
"""Fields that hold JSON in their text."""


def crafted(meta: str, body: bytes, tail: str = "}") -> bytes:
    """An entry whose header has this ``__metadata__`` and a CRC that is right for it."""
    text = f'{{"__metadata__":{meta}{tail}'.encode()
    text += b" " * (-(8 + len(text)) % 64)
    raw = bytearray(len(text).to_bytes(8, "little") + text)
    place = raw.index(b'"header_crc32c":"') + 17
    raw[place : place + 8] = b"00000000"
    raw[place : place + 8] = b"%08x" % google_crc32c.value(bytes(raw))
    return bytes(raw) + body


def taken_apart(key: KVKey = KEY, kv: ChunkKV = KV) -> tuple[dict[str, Any], bytes]:
    """What an entry's header says, nested JSON as data, and the bytes behind it."""
    image = b"".join(EntryImage(key, kv).parts())
    end = 8 + int.from_bytes(image[:8], "little")
    meta = json.loads(image[8:end])["__metadata__"]
    return {name: json.loads(v) if name in NESTED else v for name, v in meta.items()}, image[end:]


def put_together(meta: dict[str, Any]) -> str:
    """The reverse; what a mutation made of a nested field stands in its text, also NaN and the like."""
    compact = json.JSONEncoder(separators=(",", ":")).encode
    return compact({n: compact(v) if n in NESTED and not isinstance(v, Raw) else v for n, v in meta.items()})


class Raw(str):
    """A nested field that is put into the header as it stands."""


def answers(image: bytes, key: KVKey = KEY) -> list[object]:
    """What an object of these bytes gives where it is not in a file."""
    found: list[object] = []
    ways: list[Callable[[], object]] = [
        lambda: from_bytes(memoryview(image), key),
        lambda: key_in(memoryview(image), len(image)) != key,
    ]
    for way in ways:
        try:
            found.append(way())
        except EntryDamaged:
            found.append(None)
    return found


def is_a_miss(folder: Path, image: bytes, key: KVKey = KEY) -> None:
    """Through every method that reads headers, with an entry beside it that must not be touched."""
    path, name = folder / "kv", file_of(folder / "kv", key).name
    store = opened(path)
    assert store.put(key_of(7), kv_of(7))
    for ask in (store.get, store.open):
        (path / name).write_bytes(image)
        assert ask(key) is None
        assert not (path / name).exists()
    (path / name).write_bytes(image)
    assert [bad.name for bad in verify(path).damaged] == [key.digest()]
    assert store.forget(key.namespace, frozenset({"nothing"})) == 1
    assert not (path / name).exists()
    store.close()
    (path / name).write_bytes(image)
    store = opened(path)
    assert store.get(key) is None
    assert holds(store, 7)
    store.close()
    assert answers(image, key)[0] is None


BODY = bytes(512)
ZEROS = f"{google_crc32c.value(BODY):08x}"


def simple(**changes: Any) -> str:
    """``__metadata__`` of two tensors ``[2, 4, 8]`` of zeros in float32."""
    meta = {
        "header_crc32c": "00000000",
        "schema": "5",
        "fingerprint": key_of(1).fingerprint,
        "namespace": key_of(1).namespace,
        "chunk_id": key_of(1).chunk_id,
        "encoding": key_of(1).encoding,
        "context": "[]",
        "start": "",
        "quantised": "",
        "layers": '[[1,"F32",[2,4,8],"F32",[2,4,8]]]',
        "running_crc32c": ZEROS,
        "sums": "[]",
    }
    return json.dumps({**meta, **changes}, separators=(",", ":"))


def shaped(keys: str, values: str = "[2,4,8]", count: object = 1, **changes: Any) -> str:
    return simple(layers=f'[[{count},"F32",{keys},"F32",{values}]]', **changes)


EMPTY = {"running_crc32c": "00000000"}
CASES = {
    "float dims": (shaped("[2.0,4,8]"), BODY),
    "bool dims": (shaped("[true,4,8]", "[3,4,8]"), BODY),
    "negative dims": (shaped("[-2,4,-8]"), BODY),
    "overlap": (shaped("[-2,4,8]", "[4,4,8]"), BODY[:256]),
    "string shape": (shaped('"abc"', '"abc"'), BODY),
    "infinite dims": (shaped("[Infinity,4,8]"), BODY),
    "nan dims": (shaped("[NaN,4,8]"), BODY),
    "huge zero dims": (shaped(f"[{10**30},0,8]", "[2,0,8]", **EMPTY), b""),
    "sizes that overflow": (shaped(f"[{2**31 - 1},0,{2**31 - 1}]", count=9, running_crc32c="0" * 72), b""),
    "sums that overflow": (simple(sums=f'[["a","F32",{[2**31 - 1] * 4 + [0]},0]]'), BODY),
    "sums of many dims": (simple(sums=f'[["a","F32",{[1] * 3000},0]]'), BODY + bytes(4)),
    "huge count": (shaped("[2,4,8]", count=10**12), BODY),
    "float count": (shaped("[2,4,8]", count="1.0"), BODY),
    "bool count": (shaped("[2,4,8]", count="true"), BODY),
    "negative sum": (simple(sums='[["attended","F32",[-4],0]]'), BODY[:496]),
    "twice the same sum": (simple(sums='[["a","F32",[0],0],["a","F32",[0],0]]'), BODY),
    "sums out of order": (simple(sums='[["b","F32",[0],0],["a","F32",[0],0]]'), BODY),
    "unhashable name": (simple(sums='[[["a"],"F32",[0],0]]'), BODY),
    "surrogate name": (simple(sums='[["\\ud800","F32",[0],0]]'), BODY),
    "float crc": (simple(sums='[["a","F32",[0],0.0]]'), BODY),
    "deep layers": (simple(layers="[" * 200000), BODY),
    "deep context": (simple(context="[" * 200000), BODY),
    "deep metadata": ('{"header_crc32c":"00000000","schema":' + "[" * 200000, BODY),
    "layers is a list": (simple(layers=[[1]]), BODY),
    "layers is a number": (simple(layers=1), BODY),
    "number": (simple(namespace=7), BODY),
    "surrogate": (simple(namespace="\ud800"), BODY),
    "surrogate context": (simple(context='["\\ud800"]'), BODY),
    "context of numbers": (simple(context="[1,2]"), BODY),
    "context is no list": (simple(context='{"a":1}'), BODY),
    "start nan": (simple(start="nan"), BODY),
    "start in other digits": (simple(start="\u0661"), BODY),
    "start of many digits": (simple(start="9" * 5000), BODY),
    "negative start": (simple(start="-1"), BODY),
    "crc in another writing": (simple(running_crc32c=ZEROS.upper()), BODY),
    "something more": (simple(more=""), BODY),
}  # fmt: skip


@pytest.mark.parametrize(("meta", "body"), CASES.values(), ids=CASES)
def test_a_crafted_header_is_a_miss(tmp_path: Path, meta: str, body: bytes) -> None:
    image = crafted(meta, body)
    assert answers(crafted(simple(), BODY), key_of(1))[0] is not None  # the frame itself is right
    is_a_miss(tmp_path, image, key_of(1))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
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


def mutate(data: st.DataObject, meta: dict[str, Any]) -> dict[str, Any]:
    """Change, nest, double or remove one thing in the header; the seal's place stays what it is."""
    meta = copy.deepcopy(meta)
    place = data.draw(st.sampled_from([p for p in places(meta) if p and p[0] != "header_crc32c"]), "place")
    owner: Any = meta
    for step in place[:-1]:
        owner = owner[step]
    last = place[-1]
    how = data.draw(st.sampled_from(["value", "nest", "float", "text", "remove", "double", "raw"]), "how")
    if how == "nest":
        owner[last] = [owner[last]]
    elif how == "float" and type(owner[last]) is int:
        owner[last] = float(owner[last])
    elif how == "text" and not isinstance(owner[last], str):
        owner[last] = str(owner[last])
    elif how == "remove":
        del owner[last]
    elif how == "double" and isinstance(owner, list):
        owner.insert(last, owner[last])
    elif how == "raw" and place[0] in NESTED:
        meta[place[0]] = Raw(data.draw(st.text(alphabet='[]{}",:0123456789.eEaINF-tru ', max_size=12), "raw"))
    else:
        owner[last] = data.draw(VALUES, "value")
    return meta


def is_another_entry(mutated: dict[str, Any], meta: dict[str, Any]) -> bool:
    """Whether a mutation has only made what somebody might have written for this key and these bytes."""
    free = {"start", "quantised"}
    same = all(json.dumps(mutated.get(n, 0)) == json.dumps(meta[n]) for n in meta.keys() - free - {"sums"})
    start, kind = mutated.get("start"), mutated.get("quantised")
    whole = start == "" or (isinstance(start, str) and re.fullmatch("0|[1-9][0-9]*", start, re.ASCII))
    if not same or not whole or not isinstance(kind, str) or "\ud800" in kind or len(mutated) != len(meta):
        return False
    sums = mutated.get("sums")
    rows = sums if isinstance(sums, list) and not isinstance(sums, Raw) else []
    names = [row[0] for row in rows if isinstance(row, list) and len(row) == 4 and isinstance(row[0], str)]
    others = [row[1:] for row in rows if isinstance(row, list)]
    if len(names) != len(rows) or names != sorted(set(names)) or "\ud800" in "".join(names):
        return False
    return json.dumps(others) == json.dumps([row[1:] for row in meta["sums"]])


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_mutated_header_under_a_new_crc_is_a_miss(tmp_path: Path, data: st.DataObject) -> None:
    meta, body = taken_apart()
    mutated = mutate(data, meta)
    image = crafted(put_together(mutated), body)
    if is_another_entry(mutated, meta):  # whose CRC proves nothing: it guards against faults, not people
        assert answers(image)[0] is not None
    else:
        is_a_miss(tmp_path, image)


def test_what_the_frame_gives_unchanged_is_the_entry(tmp_path: Path) -> None:
    """Else the tests above would show nothing."""
    meta, body = taken_apart()
    found = from_bytes(memoryview(crafted(put_together(meta), body)), KEY)
    assert contents(found) == contents(KV)


def test_a_hostile_shape_leaves_honest_entries_of_that_shape_alone(tmp_path: Path) -> None:
    """2.0 equals 2, also as the key of a cache of layouts; nobody has read the honest shape before."""
    kv = kv_of(5, tokens=3, layers=2, heads=7, width=11)
    disk = DiskStore(tmp_path, 1 << 20)
    hostile = simple(layers='[[2,"F32",[7.0,3.0,11.0],"F32",[7.0,3.0,11.0]]]', running_crc32c="0" * 16)
    image = crafted(hostile, bytes(1848))
    assert answers(image, key_of(1)) == [None, None]
    assert disk.put(key_of(5), kv)
    found = disk.get(key_of(5))
    assert found is not None
    assert contents(found.kv) == contents(kv)
    disk.close()


def test_an_entry_larger_than_memory_is_a_miss_that_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file can be as large as its header says."""
    store = opened(tmp_path)
    assert store.put(KEY, KV)

    def take(self: Buffers, nbytes: int) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(Buffers, "take", take)
        assert store.get(KEY) is None
        assert [bad.name for bad in verify(tmp_path).unreadable] == [KEY.digest()]
    found = store.get(KEY)
    assert found is not None
    assert contents(found.kv) == contents(KV)
    store.close()
