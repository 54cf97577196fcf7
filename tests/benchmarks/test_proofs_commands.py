"""python -m benchmarks: demo and a help text for every command."""

from dataclasses import replace

import pytest

from benchmarks.cli import app
from benchmarks.demo.corpus import QUICK, Settings


@pytest.mark.parametrize(
    ("arguments", "given"),
    [((), Settings()), (("--quick",), QUICK), (("--full",), replace(Settings(), chunks=None))],
)
def test_demo_hands_its_options_on(proofs, monkeypatch, tmp_path, arguments, given):
    heard = []
    monkeypatch.setattr("benchmarks.demo.run.run", lambda *options: heard.append(options))
    assert proofs("demo", "--out", tmp_path, *arguments).exit_code == 0
    assert heard == [(given, tmp_path)]


def test_demo_is_quick_or_full(proofs):
    result = proofs("demo", "--quick", "--full")
    assert result.exit_code == 2
    assert "not both" in result.output


def test_every_command_has_a_help_text(proofs):
    commands = [info.callback.__name__.replace("_", "-") for info in app.registered_commands]
    assert {"demo", "fidelity", "query-cache-lookup", "near-misses", "budget", "eviction"} < set(commands)
    for name in commands:
        result = proofs(name, "--help")
        assert result.exit_code == 0
        assert "Usage:" in result.stdout
