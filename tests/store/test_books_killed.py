"""Writers killed between reserving, writing, counting and deleting: the budget holds, nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from redis_kit import running_server
from soak_kit import figures

SCRIPT = Path(__file__).with_name("books_killer.py")


@pytest.mark.soak
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this test needs POSIX")
def test_killed_writers_lose_their_reservations_and_objects(tmp_path: Path) -> None:
    with running_server() as server:
        command = [sys.executable, str(SCRIPT), server.url, str(tmp_path / "kv"), "60", "7"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stderr
    totals = json.loads(run.stdout)
    figures("books_killed", **totals)
    bad = ("wrong", "leases_left", "over_budget", "orphans")
    assert {name: totals.get(name, 0) for name in bad} == dict.fromkeys(bad, 0)
    assert totals["kills"] == 60
    assert totals["kept"] == 16
    assert totals["reserved_by_dead"] > 0
    assert totals["most_percent"] <= 100 + 20 * 2, "one entry (a fifth of the budget) per writer"
