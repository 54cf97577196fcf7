"""Flipped bits, cut files and a failing medium, by the thousand: a miss or the right answer, never more."""

import errno
import os
import random
from collections import Counter
from contextlib import suppress
from typing import ClassVar

import pytest

from faults import Faults, injected
from ragcachekit.errors import StoreError
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.entry import encode_entry
from soak_kit import figures
from store_kit import agrees_with_files, contents, file_of, key_of, kv_of

ENTRIES = 5
BUDGET = 1 << 20
WRITTEN = [kv_of(number, tokens=6) for number in range(ENTRIES)]
RIGHT = [contents(kv) for kv in WRITTEN]


def filled_with(path):
    store = DiskStore(path, BUDGET)
    assert all(store.put(key_of(number), WRITTEN[number]) for number in range(ENTRIES))
    store.close()
    return [file_of(path, key_of(number)).read_bytes() for number in range(ENTRIES)]


def answers(store):
    """Per entry: right, wrong, or missing."""
    found = [store.get(key_of(number)) for number in range(ENTRIES)]
    return [None if f is None else contents(f.kv) == RIGHT[n] for n, f in enumerate(found)]


def header_length(data):
    return 8 + int.from_bytes(data[:8], "little")


def flipped(data, place, bit):
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("flips", "cuts"),
    [
        pytest.param(100, 60, id="160 damages"),
        pytest.param(1_500, 400, id="1,900 damages", marks=pytest.mark.soak),
    ],
)
def test_damaged_entries_are_misses(tmp_path, flips, cuts):
    path, rng, counts = tmp_path / "kv", random.Random(1), Counter[str]()
    good = filled_with(path)
    store = DiskStore(path, BUDGET)
    for trial in range(flips + cuts):
        number = rng.randrange(ENTRIES)
        data, header = good[number], header_length(good[number])
        if trial >= flips:
            counts["truncations"] += 1
            bad = data[: rng.randrange(len(data))]
        elif trial % 2:
            counts["header flips"] += 1
            bad = flipped(data, rng.randrange(header), rng.randrange(8))
        else:
            counts["payload flips"] += 1
            bad = flipped(data, rng.randrange(header, len(data)), rng.randrange(8))
        file = file_of(path, key_of(number))
        file.write_bytes(bad)
        if rng.random() < 0.1:  # a fresh process sees it first
            store.close()
            store = DiskStore(path, BUDGET)
        found = answers(store)
        counts["wrong"] += found.count(False)
        counts["not a miss"] += found[number] is not None
        counts["others lost"] += found.count(None) - (found[number] is None)
        counts["file left"] += file.exists()
        file.write_bytes(data)
    store.close()
    figures("damaged entries", **counts)
    assert counts["header flips"] + counts["payload flips"] == flips
    assert {n: counts[n] for n in ("wrong", "not a miss", "others lost", "file left")} == {
        **{"wrong": 0, "not a miss": 0, "others lost": 0, "file left": 0}
    }


class OneInTen(Faults):
    """One call in ten is refused or cut short; each with an error that suits it."""

    KINDS: ClassVar[dict[str, tuple[int | None, ...]]] = {
        "write": (errno.ENOSPC, errno.EIO, None),
        "preadv": (errno.EIO, None),
        "replace": (errno.EIO, errno.ENOSPC),
        "open": (errno.EIO, errno.EMFILE),
        "fsync": (errno.EIO, errno.ENOSPC),
    }

    def __init__(self, root, rng):
        super().__init__(root, 0, lambda _: False)
        self.rng, self.counts = rng, Counter[str]()

    def strike(self, name, target):
        if name not in self.KINDS or not self.concerns(target) or self.rng.random() >= 0.1:
            return False
        code = self.rng.choice(self.KINDS[name])
        self.counts[f"{name} {errno.errorcode[code] if code else 'cut'}"] += 1
        if code is not None:
            raise OSError(code, os.strerror(code))
        return True


@pytest.mark.parametrize(
    "operations",
    [pytest.param(1_000, id="1,000"), pytest.param(20_000, id="20,000", marks=pytest.mark.soak)],
)
def test_a_medium_that_fails_one_time_in_ten(tmp_path, operations):
    path, rng, counts = tmp_path / "kv", random.Random(3), Counter[str]()
    values = [kv_of(number, tokens=6) for number in range(24)]
    right = [contents(kv) for kv in values]
    budget = 16 * sum(map(len, encode_entry(key_of(0), values[0]))) + 1_000
    store = DiskStore(path, budget)
    faults = OneInTen(path, random.Random(4))
    with injected(faults, reads=True):
        for _ in range(operations):
            number, drawn = rng.randrange(24), rng.random()
            if drawn < 0.35:
                counts["put" if store.put(key_of(number), values[number]) else "refused"] += 1
            elif drawn < 0.5:
                with suppress(StoreError):
                    store.forget("acme/docs", frozenset({f"chunk-{number}"}))
                    counts["forgets"] += 1
            else:
                found = store.get(key_of(number))
                counts["hits" if found else "misses"] += 1
                counts["wrong"] += found is not None and contents(found.kv) != right[number]
    counts["not put afterwards"] = sum(not store.put(key_of(n), values[n]) for n in range(24))
    store.close()
    again = DiskStore(path, budget)
    counts["orphans"] = len(
        [p for p in path.iterdir() if p.suffix not in (".safetensors", "") and p.is_file()]
    )
    figures("failing medium", operations=operations, **counts, injected=faults.counts)
    assert agrees_with_files(again, path)
    again.close()
    assert (counts["wrong"], counts["orphans"], counts["not put afterwards"]) == (0, 0, 0)
    assert min(counts["put"], counts["refused"], counts["hits"]) > operations / 30
    assert len(faults.counts) == sum(map(len, OneInTen.KINDS.values())), "every kind of failure happened"
