"""Forks writers into one folder and kills them at random moments; run by test_kill.py, answers in JSON.

A process of its own: it forks after everything is imported, which pytest with its threads must not.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import sys
from pathlib import Path

import torch
from store_kit import contents, key_of, kv_of

from ragcachekit.store.disk import DiskStore

KEYS = 24
TOKENS = 400  # 100 KB in float32: a kill falls into the middle of a write
BUDGET = 20 * 110_000
FINAL_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")


def value(number: int):  # type: ignore[no-untyped-def]
    return kv_of(number, tokens=TOKENS, heads=4)


def write_forever(folder: Path, seed: int, started: int, values: list) -> None:  # type: ignore[type-arg]
    rng = random.Random(seed)
    store = DiskStore(folder, BUDGET)
    os.write(started, b"x")
    while True:
        number = rng.randrange(KEYS)
        store.put(key_of(number), values[number])
        if rng.random() < 0.1:
            store.forget("acme/docs", frozenset({f"chunk-{rng.randrange(KEYS)}"}))


def fork_writer(folder: Path, seed: int, values: list) -> tuple[int, int]:  # type: ignore[type-arg]
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            write_forever(folder, seed, write_end, values)
        finally:
            os._exit(1)
    os.close(write_end)
    return pid, read_end


def survey(folder: Path, expected: list) -> dict[str, int]:  # type: ignore[type-arg]
    """Open the folder as the next process would, and read everything."""
    store = DiskStore(folder, BUDGET)
    wrong = hits = 0
    for number in range(KEYS):
        found = store.get(key_of(number))
        hits += found is not None
        wrong += found is not None and contents(found.kv) != expected[number]
    (stats,) = store.stats()
    names = {path.name for path in folder.iterdir()} - {"index", "lock"}
    store.close()
    sizes = sum((folder / name).stat().st_size for name in names)
    return {
        "hits": hits,
        "wrong": wrong,
        "orphans": sum(not FINAL_NAME.fullmatch(name) for name in names),
        "unindexed": abs(len(names) - stats.entries) + abs(sizes - stats.nbytes),
        "damaged": stats.damaged,
        "over_budget": max(0, sizes - BUDGET),
    }


def main(folder: Path, kills: int, writers: int, seed: int) -> None:
    torch.set_num_threads(1)  # a forked child has no copies of torch's worker threads
    rng = random.Random(seed)
    values = [value(number) for number in range(KEYS)]
    expected = [contents(kv) for kv in values]
    totals: dict[str, int] = {"kills": 0, "temp_files_seen": 0}
    while totals["kills"] < kills:
        children = [fork_writer(folder, rng.randrange(2**32), values) for _ in range(writers)]
        for _, read_end in children:
            assert os.read(read_end, 1) == b"x"
        for pid, read_end in children:
            select.select([read_end], [], [], rng.uniform(0.0, 0.04))  # the moment to kill at
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(read_end)
            totals["kills"] += 1
        totals["temp_files_seen"] += len(list(folder.glob("*.tmp")))
        for name, count in survey(folder, expected).items():
            totals[name] = totals.get(name, 0) + count
    sys.stdout.write(json.dumps(totals))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
