"""Forks writers into one folder and has them killed; run by test_kill.py, answers in JSON.

A process of its own: it forks after everything is imported, which pytest with its threads must not.

Each writer says through a pipe what it begins and what was acknowledged. ``kept`` entries are never
evicted (quotas make the others leave) nor forgotten: the last acknowledged version must be there, or the
one that was being written. ``churn`` entries come and go: they may be missing, and have to be missing
where forgetting them was acknowledged.
"""

import json
import os
import random
import select
import signal
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from faults import Faults, injected
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.disk_folder import entry_files
from ragcachekit.store.memory import HostStore
from ragcachekit.store.tiered import TieredStore
from store_kit import contents, key_of, kv_of

WRITERS = 3  # at most; each has keys of its own
KEPT, CHURN = 6, 16  # of each writer
TOKENS = 400  # 200 KB in float32: a kill falls into the middle of a write
ENTRY = 210_000
QUOTAS = {"churn": 9 * ENTRY}
BUDGET = (WRITERS * KEPT + 12) * ENTRY
CALLS = ("open", "write", "half", "utime", "replace", "unlink")
"""Calls that a writer is killed before; ``half``: after the first half of a write."""
SECONDS_TO_DIE = 60.0
OPENING = 0.03  # seconds; who is to live no longer is killed while it opens the folder
BEGIN, DONE, FORGET, FORGOTTEN = range(4)
MESSAGE = struct.Struct("<BII")
BASES = [kv_of(number, tokens=TOKENS, heads=4) for number in range(WRITERS * max(KEPT, CHURN))]


def kept(number):
    return key_of(number, namespace="kept")


def churn(number):
    return key_of(number, namespace="churn")


def value(number, version):
    base = BASES[number]
    return ChunkKV(tuple(k + version for k in base.keys), tuple(v - version for v in base.values))


@dataclass
class Known:
    """What writers have said about one entry."""

    begun: int = 0
    done: int = 0
    forgotten: bool = False


@dataclass
class Ledger:
    entries: dict[int, Known] = field(default_factory=dict)  # kept: number; churn: -1 - number

    def hear(self, raw):
        """Take in the whole messages in ``raw``; what a kill cut off said nothing. Returns how many."""
        whole = len(raw) - len(raw) % MESSAGE.size
        for kind, number, version in MESSAGE.iter_unpack(raw[:whole]):
            of_churn = version == 0
            known = self.entries.setdefault(-1 - number if of_churn else number, Known())
            if kind == BEGIN:
                known.begun, known.forgotten = version, False
            elif kind == DONE:
                known.done = version
            else:
                known.forgotten = kind == FORGOTTEN
        return whole // MESSAGE.size


class Killer(Faults):
    """Ends this process before the n-th call of a name below the folder."""

    def __init__(self, folder, call, passings):
        super().__init__(folder, 0, self.passes, cut=True)
        self.name, self.left = call, passings

    def passes(self, _):
        call = self.calls[-1]
        if call != ("write" if self.name == "half" else self.name):
            return False
        self.left -= 1
        if self.left > 0:
            return False
        if self.name == "half" and self.left == 0:
            self.name = "write"  # half of this one is written, and the process ends before the other half
            return True
        os.kill(os.getpid(), signal.SIGKILL)
        return False


def write_forever(folder, writer, seed, said, first):
    rng = random.Random(seed)
    versions = Counter(first)
    disk = DiskStore(folder, BUDGET, quotas=QUOTAS)
    # What the disk does not have comes from a slower tier and is promoted into the disk and the small host.
    slower = HostStore(1 << 30)
    for number in range(writer * CHURN, (writer + 1) * CHURN):
        slower.put(churn(number), BASES[number])
    host = HostStore(3 * ENTRY)
    tiered = TieredStore([host, disk, slower])

    def say(kind, number, version):
        os.write(said, MESSAGE.pack(kind, number, version))

    while True:
        number = writer * CHURN + rng.randrange(CHURN)
        drawn = rng.random()
        if drawn < 0.4:
            number = writer * KEPT + rng.randrange(KEPT)
            versions[number] += 1
            say(BEGIN, number, versions[number])
            if disk.put(kept(number), value(number, versions[number])):
                say(DONE, number, versions[number])
            tiered.get(kept(number))
        elif drawn < 0.6:
            say(BEGIN, number, 0)
            disk.put(churn(number), BASES[number])
        elif drawn < 0.75:
            say(FORGET, number, 0)
            for tier in (host, disk):
                tier.forget("churn", frozenset({churn(number).chunk_id}))
            say(FORGOTTEN, number, 0)
        else:
            say(BEGIN, number, 0)
            tiered.get(churn(number))


def fork_writer(folder, writer, seed, killing, first):
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            with injected(Killer(folder, *killing)):
                write_forever(folder, writer, seed, write_end, first)
        finally:
            os._exit(1)
    os.close(write_end)
    return pid, read_end


def listen(children, lifetimes):
    """What each child says until it is dead; each is killed at the end of its own lifetime.

    That begins with its first message, or at once if it is to be killed while it opens the folder.
    """
    said = dict.fromkeys(children, b"")
    ends = {read_end: pid for pid, read_end in children.items()}
    began = time.monotonic()
    after = dict(zip(children, lifetimes, strict=True))
    living = {pid: began + (s if s < OPENING else SECONDS_TO_DIE) for pid, s in after.items()}
    while ends:
        wait = max(0.0, min(living.values()) - time.monotonic()) if living else None
        ready, _, _ = select.select(list(ends), [], [], wait)
        for pid in [pid for pid, end in living.items() if time.monotonic() >= end]:
            os.kill(pid, signal.SIGKILL)  # not waited for yet: the number is still its own
            del living[pid]
        for read_end in ready:
            heard, pid = os.read(read_end, 1 << 16), ends[read_end]
            if heard:
                if pid in living and not said[pid]:
                    living[pid] = time.monotonic() + after[pid]
                said[pid] += heard
            else:
                living.pop(pid, None)
                os.close(read_end)
                del ends[read_end]
    return said


def survey(folder, ledger):
    """Open the folder as the next process would, and read everything."""
    totals: Counter[str] = Counter()
    totals["temp_files_seen"] = len(list(folder.glob("*.tmp")))
    store = DiskStore(folder, BUDGET, quotas=QUOTAS)
    (stats,) = store.stats()
    names = {path.name for path in folder.iterdir()} - {"lock"}
    sizes = sum((folder / name).stat().st_size for name in names)
    totals["orphans"] = len(names - entry_files(folder).keys())
    totals["uncounted"] = abs(len(names) - stats.entries) + abs(sizes - stats.nbytes)
    totals["over_budget"] = max(0, sizes - BUDGET)
    for place, known in ledger.entries.items():
        key = kept(place) if place >= 0 else churn(-1 - place)
        found = store.get(key)
        totals["hits"] += found is not None
        if place >= 0:
            right = [contents(value(place, version)) for version in {known.done, known.begun}]
            totals["lost"] += found is None and known.done > 0
            totals["checked"] += known.done > 0
        else:
            right = [contents(BASES[-1 - place])]
            totals["unforgotten"] += found is not None and known.forgotten
        totals["wrong"] += found is not None and contents(found.kv) not in right
        if place >= 0 and found is not None:  # what the next writers go on from
            known.done = (
                known.begun if contents(found.kv) == contents(value(place, known.begun)) else known.done
            )
    totals["damaged"] = store.stats()[0].damaged
    store.close()
    return totals


def rounds(kills, named, rng):
    """Whom to kill where: at random moments, or each before the n-th call of a name."""
    if not named:
        return [(("", 0), rng.uniform(0.02, 0.12)) for _ in range(kills)]
    return [((call, rng.randint(1, 4)), SECONDS_TO_DIE) for call in CALLS for _ in range(kills)]


def main(folder, kills, writers, seed, named):
    torch.set_num_threads(1)  # a forked child has no copies of torch's worker threads
    rng = random.Random(seed)
    ledger, totals = Ledger(), Counter[str]()
    planned = rounds(kills, named, rng)
    survivors = []
    for start in range(0, len(planned), writers):
        group = planned[start : start + writers]
        first = {place: known.begun for place, known in ledger.entries.items() if place >= 0}
        children = dict(
            fork_writer(folder, writer, rng.randrange(2**32), killing, first)
            for writer, (killing, _) in enumerate(group)
        )
        began = time.monotonic()
        for pid, raw in listen(children, [seconds for _, seconds in group]).items():
            totals["operations"] += ledger.hear(raw)
            _, status = os.waitpid(pid, 0)
            totals["kills"] += os.WIFSIGNALED(status)
            totals["died_alone"] += not os.WIFSIGNALED(status)
        if named and time.monotonic() - began >= SECONDS_TO_DIE:
            survivors.append([call for (call, _), _ in group])
        totals += survey(folder, ledger)
    counts = {name: totals[name] for name in sorted(totals)}
    sys.stdout.write(json.dumps({**counts, "points": len(CALLS) if named else 0, "survivors": survivors}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), named=sys.argv[5] == "named")
