"""ragcachekit precompute: how much it is, doing it, stopping in between, and that ask finds it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks.world.reader_folder import READER
from command_fixtures import kv_of
from engine_kit import checked
from ragcachekit.commands.embedding import DIM
from ragcachekit.commands.precompute import PrecomputeSettings, open_run
from ragcachekit.commands.questions import PromptMaker
from ragcachekit.commands.workspace import OwnFiles
from ragcachekit.store.disk import DiskStore
from ragcachekit.types import DEFAULT_ENCODER


@pytest.fixture
def chunks(world):
    return sum(len(article.chunks) for article in world.articles)


class Quick:
    """Embeds at once: any unit vectors."""

    def embed(self, texts, *, progress=False):
        return np.eye(len(texts), DIM, dtype=np.float32)


@pytest.fixture(autouse=True)
def quick_embedding(monkeypatch):
    monkeypatch.setattr("ragcachekit.commands.embedding.MiniLM", Quick)


@pytest.fixture
def precompute(command, mine, tmp_path):
    def run(*arguments, cache=tmp_path / "cache"):
        return command(
            *("precompute", "--corpus", mine, "--model", READER, "--cache", checked(cache)),
            *("--chunk-tokens", "34", *arguments),
        )

    return run


@pytest.fixture
def settings(mine, tmp_path):
    return PrecomputeSettings(
        str(mine), READER, cache=str(tmp_path / "cache"), chunk_tokens=34, encoder="system"
    )


def encoded(result):
    """(chunks encoded, chunks that were stored already)"""
    found = re.search(r"encoded (\d+) chunks? .* s: \1 new, (\d+) kept", result.stdout)
    assert found, result.output
    return int(found[1]), int(found[2])


def test_the_second_run_has_nothing_to_do(precompute):
    first, again = precompute(), precompute()
    count, before = encoded(first)
    assert (count > 10, before) == (True, 0)
    assert encoded(again) == (0, count)
    assert [bool(re.search(r"this takes about \d+ s", r.stderr)) for r in (first, again)] == [True, False]


def test_ask_finds_every_chunk(precompute, command, corpus, one_minilm, prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "cache", symlinks=True)
    precompute("--corpus", corpus)
    options = ("--corpus", corpus, "--model", READER, "--cache", tmp_path / "cache", "--chunk-tokens", "34")
    result = command("ask", *options, "--policy", "reuse", "Where was he born?")
    total, kept, computed = re.search(
        r"(\d+) tokens: (\d+) reused from (?:disk|host) .* (\d+) computed", result.stdout
    ).groups()
    assert int(total) == int(kept) + int(computed)
    assert int(kept) > int(total) / 2


def test_a_dry_run_writes_nothing(precompute, settings, tmp_path):
    with open_run(settings, dry=True) as run:
        tokens = sum(len(chunk.token_ids) for chunk in run.chunks)
        config = json.loads((Path(READER) / "config.json").read_text())
        per_token = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2 * 4
        assert run.token_bytes == per_token
        tokenizer = AutoTokenizer.from_pretrained(READER)
        before = len(tokenizer(PromptMaker(tokenizer).before, add_special_tokens=False).input_ids)
        ids = 4 * (tokens + len(run.chunks) * before)  # of all that an entry was computed from, for forget
        assert run.todo_bytes == tokens * per_token + ids
    result = precompute("--dry-run", "--encoder", "system", "--cache", tmp_path / "none")
    assert result.exit_code == 0
    amount = f"{len(run.chunks)} chunks, {tokens} tokens, {run.todo_bytes / 1e6:.1f} MB of KV"
    assert amount in result.stdout
    assert not (tmp_path / "none").exists()


def test_the_estimate_is_what_is_then_stored(settings):
    with open_run(settings) as run:
        run.run()
    entries = list(kv_of(settings.folder.kv))
    assert sum(kv.nbytes for kv in entries) == run.todo_bytes
    assert (sum(kv.tokens for kv in entries), len(entries)) == (run.todo_tokens, len(run.chunks))


def test_the_default_is_the_encoder_of_ask_and_its_dry_run_says_the_bytes(settings):
    means = replace(settings, encoder=None)
    assert means.chunk_encoder == OwnFiles(settings.corpus, READER).chunk_encoder == DEFAULT_ENCODER
    assert replace(means, shared="file:///x").chunk_encoder == "system"  # its engines cannot list means
    with open_run(means, dry=True) as dry:
        amount = dry.todo_bytes
    with open_run(means) as run:
        assert run.todo_bytes == amount
        run.run()
    entries = list(kv_of(settings.folder.kv))
    assert len(entries) == 2 * len(run.chunks)  # after the system text, and the mean
    assert amount == pytest.approx(sum(kv.nbytes for kv in entries), rel=0.25)


def test_a_dry_run_sees_what_is_stored(precompute):
    count, _ = encoded(precompute())
    result = precompute("--dry-run")
    assert f"it would be: 0 new, {count} kept" in result.stdout


@pytest.fixture
def mine(corpus, tmp_path):
    """Some of the corpus, to be changed."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for file in sorted(corpus.iterdir())[:6]:
        shutil.copy(file, folder)
    return folder


def stored(tmp_path):
    """Names of the entries on disk."""
    return {path.name for path in (tmp_path / "cache" / "kv").glob("*.safetensors")}


def test_a_changed_document_is_encoded_alone(precompute, mine, tmp_path):
    count, _ = encoded(precompute("--encoder", "system"))
    before, file = stored(tmp_path), sorted(mine.iterdir())[0]
    first, *rest = file.read_text().split("\n\n")
    file.write_text("\n\n".join([" ".join(reversed(first.split())), *rest]))
    assert encoded(precompute("--encoder", "system")) == (1, count - 1)
    assert (len(stored(tmp_path)), len(stored(tmp_path) - before)) == (count + 1, 1)
    file.unlink()
    assert encoded(precompute("--encoder", "system")) == (0, count - 1 - len(rest))


def test_an_interrupted_run_goes_on(precompute, mine, tmp_path, monkeypatch):
    put, calls = DiskStore.put, []

    def interrupted(store, key, kv):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(key)
        return put(store, key, kv)

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "put", interrupted)
        result = precompute("--encoder", "system")
    assert "interrupted; what was stored stays" in result.output
    new, kept = encoded(precompute("--encoder", "system"))
    assert (kept, len(stored(tmp_path))) == (2, new + 2)


def test_a_disk_that_refuses_is_an_error(precompute, monkeypatch):
    monkeypatch.setattr(DiskStore, "put", lambda *_: False)
    result = precompute()
    assert result.exit_code == 2
    assert "could not be stored; free some space" in result.output


def test_a_corpus_larger_than_the_budget_is_refused_first(precompute):
    result = precompute("--disk-gb", "0.0001")
    assert result.exit_code == 2
    assert "raise --disk-gb" in result.output


def test_namespaces_and_encoders_are_apart(precompute):
    count, _ = encoded(precompute())
    assert encoded(precompute("--namespace", "other")) == (count, 0)
    assert encoded(precompute("--encoder", "standalone")) == (count, 0)
    assert encoded(precompute("--policy", "reuse")) == (0, count)
    assert encoded(precompute("--encoder", "system")) == (0, count)  # those are kept beside each mean
