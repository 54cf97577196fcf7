"""SIGKILL in the middle of disk writes: afterwards nothing is wrong and nothing lies around."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill_writers.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the disk tier and this test need POSIX")
@pytest.mark.parametrize(
    ("kills", "writers"),
    [
        pytest.param(50, 1, id="50 kills"),
        pytest.param(12, 3, id="three writers share the folder"),
        pytest.param(600, 1, id="600 kills", marks=pytest.mark.soak),
        pytest.param(200, 4, id="four writers, 200 kills", marks=pytest.mark.soak),
    ],
)
def test_killed_writers_leave_whole_entries_and_no_orphans(tmp_path: Path, kills: int, writers: int) -> None:
    folder = tmp_path / "kv"
    command = [sys.executable, str(SCRIPT), str(folder), str(kills), str(writers), "11"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stderr
    totals = json.loads(run.stdout)
    assert totals["kills"] == kills
    bad = {name: totals[name] for name in ("wrong", "orphans", "unindexed", "damaged", "over_budget")}
    assert bad == dict.fromkeys(bad, 0)
    # The kills hit something: writers were interrupted half way, and entries survived.
    assert totals["hits"] > 0
    assert totals["temp_files_seen"] > 0
