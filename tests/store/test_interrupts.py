"""KeyboardInterrupt at any moment of a load, a read or a guarded call: it comes through alone."""

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("rounds", [250, pytest.param(800, marks=pytest.mark.soak)])
def test_nothing_is_left_locked_open_or_dead(tmp_path, said_by, rounds):
    """In a process of its own: signals go to its main thread, and what it leaves locked stays so."""
    found = json.loads(said_by(HERE / "interrupted_loads.py", tmp_path / "kv", 1, rounds))
    assert found.pop("interrupts") > 100
    assert found == {"others": {}, "descriptors": 0, "dead threads": 0}
