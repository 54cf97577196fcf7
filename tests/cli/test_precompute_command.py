"""ragcachekit precompute: how much it is, doing it, stopping in between, and that ask finds it."""

import json
import re
import shutil
from pathlib import Path

import pytest

from ragcachekit.bench.precompute import PrecomputeSettings, estimate, open_run
from ragcachekit.bench.workspace import READER, model_path
from ragcachekit.errors import StoreError
from ragcachekit.store.disk import DiskStore


@pytest.fixture
def chunks(world):
    return sum(len(article.chunks) for article in world.articles)


@pytest.fixture
def precompute(command, corpus, tmp_path):
    def run(*arguments):
        return command(
            *("precompute", "--corpus", corpus, "--model", "reader", "--cache", tmp_path / "cache"),
            *("--chunk-tokens", "34", *arguments),
        )

    return run


@pytest.fixture
def settings(corpus, tmp_path):
    return PrecomputeSettings(str(corpus), READER, cache=str(tmp_path / "cache"), chunk_tokens=34)


def encoded(result):
    """(chunks encoded, chunks that were stored already)"""
    found = re.search(r"encoded (\d+) chunks .* (\d+) were stored already", result.stdout)
    assert found, result.output
    return int(found[1]), int(found[2])


def test_the_second_run_has_nothing_to_do(precompute):
    count, before = encoded(precompute())
    assert (count > 10, before) == (True, 0)
    assert encoded(precompute()) == (0, count)


def test_ask_finds_every_chunk(precompute, command, corpus, one_minilm, prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "cache")
    precompute()
    options = ("--corpus", corpus, "--model", "reader", "--cache", tmp_path / "cache", "--chunk-tokens", "34")
    result = command("ask", *options, "--policy", "reuse", "Where was he born?")
    total, kept, computed = re.search(
        r"(\d+) tokens: (\d+) reused from disk .* (\d+) computed", result.stdout
    ).groups()
    assert int(total) == int(kept) + int(computed)
    assert int(kept) > int(total) / 2


def test_a_dry_run_measures_and_writes_nothing(precompute, settings, tmp_path):
    work = estimate(settings)
    config = json.loads((Path(model_path(READER)) / "config.json").read_text())
    per_token = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2 * 4
    per_token += 4  # the attention that the token got, kept for policies
    assert work.token_bytes == per_token
    assert work.todo_bytes == work.tokens * per_token
    assert work.seconds > 0
    result = precompute("--dry-run")
    assert result.exit_code == 0
    assert (
        f"{work.chunks} chunks, {work.tokens} tokens, {work.todo_bytes / 1e6:.1f} MB of KV" in result.stdout
    )
    assert not (tmp_path / "cache").exists()


def test_a_dry_run_counts_what_is_stored(precompute, settings, tmp_path):
    count, _ = encoded(precompute())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    work = estimate(settings)
    assert (work.stored, work.todo_tokens, work.seconds) == (count, 0, None)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == before


def test_the_estimate_is_what_is_then_stored(settings):
    work = estimate(settings)
    with open_run(settings) as opened:
        assert (opened.work.todo_bytes, opened.work.chunks) == (work.todo_bytes, work.chunks)
        done = opened.run()
    assert (done.nbytes, done.tokens, done.encoded) == (work.todo_bytes, work.tokens, work.chunks)


def test_an_interrupted_run_goes_on_where_it_stopped(precompute, settings, monkeypatch):
    whole, put, calls = estimate(settings).chunks, DiskStore.put, []

    def interrupted(store, key, kv):
        if len(calls) == 5:
            raise KeyboardInterrupt
        calls.append(key)
        return put(store, key, kv)

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "put", interrupted)
        result = precompute()
    assert result.exit_code == 130
    assert "interrupted; what was stored stays" in result.output
    assert encoded(precompute()) == (whole - 5, 5)


def test_a_disk_that_refuses_is_an_error(precompute, monkeypatch):
    monkeypatch.setattr(DiskStore, "put", lambda *_: False)
    result = precompute()
    assert result.exit_code == 2
    assert "could not be stored; free some space" in result.output


def test_a_corpus_larger_than_the_budget_or_the_disk_is_refused_first(precompute, settings, monkeypatch):
    result = precompute("--disk-gb", "0.0001")
    assert result.exit_code == 2
    assert "raise --disk-gb" in result.output
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("ragcachekit.bench.precompute.shutil.disk_usage", lambda _: usage)
    with pytest.raises(StoreError, match="choose another --cache"), open_run(settings):
        pass


def test_namespaces_and_encoders_are_apart(precompute):
    count, _ = encoded(precompute())
    assert encoded(precompute("--namespace", "other")) == (count, 0)
    assert encoded(precompute("--encoder", "system")) == (count, 0)
    assert encoded(precompute("--policy", "lego0")) == (count, 0)
    assert encoded(precompute("--policy", "reuse")) == (0, count)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "fastest"), "unknown policy 'fastest'"),
        (("--encoder", "sinks:0"), "sinks:n needs a number n >= 1"),
        (("--chunk-tokens", "0"), "Invalid value for '--chunk-tokens'"),
        (("--corpus", "/nowhere/at/all"), "does not exist"),
        (("--model", "/nowhere/at/all"), "cannot load the model"),
        (("--dtype", "int3"), "unknown dtype"),
    ],
)
def test_bad_arguments_are_one_line(precompute, arguments, message):
    result = precompute(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_cache_folder_that_is_a_file_is_one_line(precompute, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kv").write_text("x")
    result = precompute()
    assert result.exit_code == 2
    assert "is a file" in result.output
