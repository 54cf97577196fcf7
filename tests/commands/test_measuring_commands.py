"""check-model, bench, and what the bare command does."""

import json
import subprocess
import sys

import pytest

from benchmarks.world.reader_folder import READER
from ragcachekit.commands import console, report


def test_the_reader_is_linked(command, tmp_path):
    result = command("check-model", READER, "--json", tmp_path / "check.json")
    assert result.exit_code == 0
    assert "linked" in result.stdout
    frame = json.loads((tmp_path / "check.json").read_text())
    (row,) = frame["rows"]
    assert (frame["bench"], row["family"], row["status"]) == ("check-model", "LlamaForCausalLM", "linked")
    assert row["token_bytes"] > 0


def test_learned_positions_have_grade_prefix(command, learned_positions):
    result = command("check-model", learned_positions)
    assert result.exit_code == 0
    assert "prefix" in result.stdout
    assert "keys, values per token" in result.stdout
    assert "uses no rotary module" in " ".join(result.stdout.split())


@pytest.mark.parametrize("random_weights", [False, True])
def test_ttft_writes_json(command, proofs, tmp_path, random_weights):
    options = (
        *("--prompt-tokens", "200", "--chunk-tokens", "50"),
        *("--question-tokens", "16", "--policies", "lego:4, reuse", "--runs", "1"),
        *("--json", tmp_path / "t.json"),
    )
    if random_weights:
        result = proofs("ttft", "--shape", "tiny", "--plot", tmp_path / "t.png", *options)
        assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    else:
        result = command("bench", "ttft", "--model", READER, *options)
    assert result.exit_code == 0
    assert ("random weights" in result.stdout) == random_weights
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert {"full", "lego:4", "reuse"} <= {row["policy"] for row in rows}


def test_help_and_version_need_no_torch():
    program = (
        "import sys; from typer.testing import CliRunner; from ragcachekit.commands.app import app; "
        "r = CliRunner(); out = [r.invoke(app, a.split()).exit_code for a in "
        "('--help', 'ask --help', 'bench ttft --help', 'cache --help', '--version')]; "
        "print(out, sorted({'torch', 'transformers', 'numpy', 'langchain_core'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[0] == "[0, 0, 0, 0, 0] []", done.stderr


def test_what_extra_is_missing_is_one_line(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "ragcachekit.commands.embedding", None)
    result = command("ask", "--corpus", ".", "--model", READER, "Why?")
    assert result.exit_code == 2
    assert "pip install langchain-core faiss-cpu gguf" in " ".join(result.output.split())


def test_a_table_of_many_columns_is_whole_in_a_narrow_terminal(monkeypatch, capsys):
    row = {f"some_long_name_{n}": value for n, value in enumerate(["prefix-cache", *[12345.0] * 12])}
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setattr("rich.console.Console.is_dumb_terminal", False)
    console.show(report.table("A title", [row]))
    out = capsys.readouterr().out
    assert "prefix-cache" in out
    assert out.count("12,345") == 12
