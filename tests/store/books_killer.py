"""Forks writers with common books and kills them; run by test_books_killed.py, answers in JSON.

A process of its own: it forks after everything is imported, which pytest with its threads must not.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import redis
from fsspec.implementations.local import LocalFileSystem
from store_kit import contents, key_of, kv_of

from ragcachekit.store.booked_backend import BookedBackend
from ragcachekit.store.books import Books
from ragcachekit.store.entry_bytes import to_bytes
from ragcachekit.store.guard import Guard
from ragcachekit.store.remote_store import RemoteStore
from ragcachekit.store.seal import OVERHEAD, Seal

KEYS, ENTRIES, LEASE, STEPS = 16, 5, 3.0, 40
VALUES = [kv_of(number, tokens=64) for number in range(KEYS)]
ENTRY = OVERHEAD + sum(len(part) for part in to_bytes(key_of(10), VALUES[10]))
BUDGET = ENTRIES * ENTRY + 64
POINTS = ("before pipe_file", "before mv", "after mv", "before rm_file", "after rm_file")
SEED_OF_KEY = b"a key for tests, nothing more"


class Deadly(LocalFileSystem):
    """Kills its process at the ``left``-th pass of ``point``."""

    cachable = False
    point, left = "", 0

    def _pass(self, point: str) -> None:
        if point == self.point:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)

    def pipe_file(self, path, value, **options):
        self._pass("before pipe_file")
        super().pipe_file(path, value, **options)

    def mv(self, *args, **options):
        self._pass("before mv")
        super().mv(*args, **options)
        self._pass("after mv")

    def rm_file(self, path):
        self._pass("before rm_file")
        super().rm_file(path)
        self._pass("after rm_file")


def opened(url: str, folder: Path, fs: LocalFileSystem) -> RemoteStore:
    def books(**told):
        return Books(url, 10.0, LEASE, cooldown=0.0, **told)

    backend = BookedBackend(fs, str(folder), BUDGET, {}, books)
    return RemoteStore("bulk", backend, Seal(SEED_OF_KEY), Guard("bulk", 40.0, failures=1_000), BUDGET)


def checked(store: RemoteStore, number: int) -> bool:
    found = store.get(key_of(number))
    if found is not None and contents(found.kv) != contents(VALUES[number]):
        os._exit(3)
    return found is not None


def write(url: str, folder: Path, seed: int, point: str, steps: int) -> None:
    """At random, until killed or through; any answer that is wrong ends it with 3."""
    draw, fs = random.Random(seed), Deadly()
    store = opened(url, folder, fs)
    store.stats()  # by now the folder is marked and listed: points are those of entries
    fs.point, fs.left = point, draw.randrange(1, 6)
    for _ in range(steps):
        number = draw.randrange(KEYS)
        if draw.random() < 0.7:
            store.put(key_of(number), VALUES[number])
        elif draw.random() < 0.1:
            store.forget(key_of(number).namespace, frozenset({key_of(number).chunk_id}))
        checked(store, number)
    os._exit(0)


def forked(*arguments: object) -> int:
    pid = os.fork()
    if not pid:
        try:
            write(*arguments)  # type: ignore[arg-type]
        finally:
            os._exit(4)
    return pid


def nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*/*.kv"))


def run(url: str, folder: Path, kills: int, seed: int) -> Counter[str]:
    draw, totals, client = random.Random(seed), Counter[str](), redis.Redis.from_url(url)
    for kill in range(kills):
        if kill % 10 == 9:
            client.flushall()
            totals["losses"] += 1
        point = POINTS[kill % (len(POINTS) + 1)] if kill % (len(POINTS) + 1) < len(POINTS) else ""
        doomed = forked(url, folder, seed + 2 * kill, point, 10_000)
        other = forked(url, folder, seed + 2 * kill + 1, "", STEPS)
        if not point:
            time.sleep(draw.uniform(0.01, 0.3))  # the moment of death, not a synchronisation
            os.kill(doomed, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(doomed, 0)[1])
        totals["kills"] += code == -signal.SIGKILL
        totals["wrong"] += code == 3
        totals["wrong"] += os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) != 0
        totals["most_percent"] = max(totals["most_percent"], round(100 * nbytes(folder) / BUDGET))
        totals["reserved_by_dead"] += sum(client.hlen(name) for name in client.keys("*:writes"))
    return totals + after(url, folder, client)


def after(url: str, folder: Path, client: redis.Redis) -> Counter[str]:
    """What is left once the leases of the dead have run out."""
    totals, store = Counter[str](), opened(url, folder, LocalFileSystem())
    end = time.monotonic() + 60
    while any(client.zcard(name) for name in client.keys("*:leases")) and time.monotonic() < end:
        store.put(key_of(0), VALUES[0])
    totals["leases_left"] = sum(client.zcard(name) for name in client.keys("*:leases"))
    while True:  # reads put right what the books know too much; ends with the test's time limit at the latest
        totals["read"] = sum(checked(store, number) for number in range(KEYS))
        if store.stats()[0].nbytes == nbytes(folder):
            break
    totals["over_budget"] = int(nbytes(folder) > BUDGET)
    totals["kept"] = sum(store.put(key_of(number), VALUES[number]) for number in range(KEYS))
    store.forget(key_of(0).namespace)
    totals["orphans"] = len(list(folder.glob("*/*.kv")))
    return totals


if __name__ == "__main__":
    address, place, count, first = sys.argv[1:]
    sys.stdout.write(json.dumps(run(address, Path(place), int(count), int(first))))
