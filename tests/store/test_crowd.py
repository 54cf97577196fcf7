"""Processes and threads in one folder: every value right, budget kept, nothing leaks."""

import json
from pathlib import Path

import pytest

from ragcachekit.store.disk import DiskStore
from soak_kit import figures
from store_kit import agrees_with_files

SCRIPT = Path(__file__).with_name("disk_crowd.py")
# Allocators keep what threads freed for later; entries are 8 KB, so one leaked in fifty would show.
RESIDENT = 24 << 20
# Nothing is open when the threads are done, before as after.
DESCRIPTORS = 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads memory and descriptors from /proc")
@pytest.mark.soak
def test_many_at_work_in_one_folder(tmp_path, said_by):
    processes, threads, operations = 4, 4, 100_000
    folder = tmp_path / "kv"
    reports = json.loads(said_by(SCRIPT, folder, processes, threads, operations))
    assert len(reports) == processes
    totals = {name: sum(report[name] for report in reports) for name in reports[0]}
    figures("crowd", processes=processes, threads=threads, operations=operations, **totals)
    assert totals["puts"] + totals["forgets"] + totals["hits"] + totals["misses"] > 0.98 * operations
    assert (totals["wrong"], totals["damaged"], totals["over_budget"]) == (0, 0, 0)
    # A forget stops what all others are just putting, where it cannot tell whether that is concerned.
    assert totals["refused"] <= totals["forgets"] * (processes * threads - 1)
    assert totals["hits"] > operations / 10
    assert totals["misses"] > operations / 100
    assert max(report["resident_growth"] for report in reports) <= RESIDENT
    assert max(report["descriptor_growth"] for report in reports) <= DESCRIPTORS
    store = DiskStore(folder, 1 << 40)
    assert agrees_with_files(store, folder)
    store.close()
