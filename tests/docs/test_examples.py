"""What examples/ shows runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "langchain_app.py"


def test_the_langchain_program_answers_and_reuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = importlib.util.spec_from_file_location("langchain_app", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    out = capsys.readouterr().out
    assert re.findall(r"\? (\w+)", out) == ["Pebblebeach", "turtle", "Elmstone"]
    counts = [tuple(map(int, found)) for found in re.findall(r"(\d+) tokens: (\d+) reused", out)]
    assert counts[0][1] == 0
    assert all(reused > 0.75 * tokens for tokens, reused in counts[1:])


def test_its_two_lines_are_marked() -> None:
    marked = re.findall(r"(\w+)\(.*# <- line (\d)", EXAMPLE.read_text())
    assert marked == [("wrap", "1"), ("ChatRagCache", "2")]
