"""SIGKILL in the middle of disk writes: afterwards nothing is wrong, lost, or lying around."""

import json
import os
from pathlib import Path

import pytest

from soak_kit import figures

SCRIPT = Path(__file__).with_name("kill_writers.py")
BAD = ("wrong", "lost", "unforgotten", "orphans", "uncounted", "damaged", "over_budget", "died_alone")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this test forks")


@pytest.fixture
def killed(tmp_path, said_by):
    def run(kills, writers, how):
        totals = json.loads(said_by(SCRIPT, tmp_path / "kv", kills, writers, 11, how))
        figures("kill", how=how, writers=writers, **totals)
        assert {name: totals.get(name, 0) for name in BAD} == dict.fromkeys(BAD, 0)
        assert totals["checked"] > 0, "acknowledged entries were looked for"
        return totals

    return run


@pytest.mark.parametrize(
    ("kills", "writers"),
    [
        pytest.param(3, 1, id="3 kills"),
        pytest.param(4, 3, id="three writers share the folder"),
        pytest.param(300, 1, id="300 kills", marks=pytest.mark.soak),
        pytest.param(200, 3, id="three writers, 200 kills", marks=pytest.mark.soak),
    ],
)
def test_killed_writers_leave_whole_entries_and_no_orphans(killed, kills, writers):
    totals = killed(kills, writers, "random")
    assert totals["kills"] == kills
    # Writers were interrupted half way, which a few kills at random moments may miss; named calls do not.
    assert totals["operations"] > kills
    assert kills < 100 or totals["temp_files_seen"] > 0


@pytest.mark.parametrize(
    ("kills", "writers"),
    [
        pytest.param(1, 1, id="once before each call"),
        pytest.param(10, 1, id="10 kills before each call", marks=pytest.mark.soak),
        pytest.param(10, 3, id="10 kills before each call, three writers", marks=pytest.mark.soak),
    ],
)
def test_killed_before_every_call(killed, kills, writers):
    totals = killed(kills, writers, "named")
    assert totals["survivors"] == []  # every call was made
    assert totals["kills"] == kills * totals["points"]
    assert totals["points"] >= 6
