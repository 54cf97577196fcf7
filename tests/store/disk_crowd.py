"""Several processes with several threads each at work in one folder; run by test_crowd.py.

A process of its own: it forks after everything is imported. Every value that is read is checked against
all that was ever written under its key: the base of that number plus one of a few versions.
"""

import json
import os
import random
import sys
import threading
from collections import Counter
from pathlib import Path

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.disk import DiskStore
from store_kit import contents, key_of, kv_of

NAMESPACES = ("acme", "globex")
KEYS, VERSIONS, TOKENS = 60, 4, 16
BUDGET, QUOTAS = 40 * 9_000, {"globex": 12 * 9_000}
WARM_UP = 0.3  # share of the operations after which memory is looked at for the first time
BASES = [kv_of(number, tokens=TOKENS) for number in range(KEYS)]


def key(number):
    return key_of(number, namespace=NAMESPACES[number % 2])


def value(number, version):
    base = BASES[number]
    return ChunkKV(tuple(k + version for k in base.keys), tuple(v - version for v in base.values))


RIGHT = [{contents(value(number, version)) for version in range(VERSIONS)} for number in range(KEYS)]


def use(store, rng, operations, counts):
    for _ in range(operations):
        number, drawn = rng.randrange(KEYS), rng.random()
        if drawn < 0.2:
            counts["puts"] += 1
            counts["refused"] += not store.put(key(number), value(number, rng.randrange(VERSIONS)))
        elif drawn < 0.22:
            counts["forgets"] += 1
            store.forget(key(number).namespace, frozenset({key(number).chunk_id}))
        else:
            found = store.get(key(number))
            counts["hits" if found else "misses"] += 1
            counts["wrong"] += found is not None and contents(found.kv) not in RIGHT[number]


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def crowd(folder, threads, operations, seed):
    """What the threads of one process saw, and how much its memory and descriptors grew after warming up."""
    store = DiskStore(folder, BUDGET, quotas=QUOTAS)
    counts = [Counter[str]() for _ in range(threads)]
    seen: list[tuple[int, int]] = []
    for share in (WARM_UP, 1 - WARM_UP):
        workers = [
            threading.Thread(
                target=use,
                args=(store, random.Random(f"{seed} {share} {n}"), int(operations * share), counts[n]),
            )
            for n in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seen.append((resident(), descriptors()))
    stats = store.stats()[0]
    store.close()
    total = sum(counts, Counter[str]())
    return {
        **{name: total[name] for name in ("puts", "refused", "forgets", "hits", "misses", "wrong")},
        "damaged": stats.damaged,
        "over_budget": max(0, stats.nbytes - BUDGET),
        "resident_growth": seen[1][0] - seen[0][0],
        "descriptor_growth": seen[1][1] - seen[0][1],
    }


def fork(folder, threads, operations, seed):
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            os.write(write_end, json.dumps(crowd(folder, threads, operations, seed)).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write_end)
    return pid, read_end


def main(folder, processes, threads, operations):
    torch.set_num_threads(1)
    children = [fork(folder, threads, operations // (processes * threads), seed) for seed in range(processes)]
    reports = []
    for pid, read_end in children:
        with open(read_end, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"process {pid} ended with {status}")
        reports.append(json.loads(said))
    sys.stdout.write(json.dumps(reports))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
