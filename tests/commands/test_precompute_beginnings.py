"""ragcachekit precompute on a model whose chunks cannot be linked: the hottest beginnings of a log."""

import json
import re
import shutil

import pytest

from benchmarks.world.reader_folder import READER
from ragcachekit import RagCache
from ragcachekit.commands.beginnings import count_beginnings
from ragcachekit.commands.corpus import read_corpus
from ragcachekit.commands.precompute import PrecomputeSettings, open_run
from ragcachekit.commands.questions import SEPARATOR, PromptMaker
from ragcachekit.commands.workspace import load_tokenizer
from ragcachekit.config import StoreConfig

ORDERS = [(0, 1), (0, 1, 2), (0, 2), (3,), (0, 1), (3, 4), (5, 6)]
HOT = [((), 7), ((0,), 4), ((0, 1), 3), ((3,), 2)]


@pytest.fixture
def chunks(corpus, hybrid):
    return read_corpus(corpus, chunk_tokens=34, tokenizer=load_tokenizer(hybrid)).chunks


@pytest.fixture
def log(tmp_path, chunks):
    def write(orders, name="log.jsonl"):
        named = [[f"{chunks[i].source}#{chunks[i].number}" for i in order] for order in orders]
        lines = [{"question": f"Question {n}?", "chunks": one} for n, one in enumerate(named)]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path / name

    return write


@pytest.fixture
def settings(corpus, hybrid, tmp_path, one_minilm):
    def of(**options):
        fixed = {"cache": str(tmp_path / "cache"), "chunk_tokens": 34}
        return PrecomputeSettings(str(corpus), str(hybrid), **fixed, **options)

    return of


@pytest.fixture
def precompute(command, corpus, hybrid, tmp_path, one_minilm):
    def run(*arguments, cache="cache", model=hybrid):
        options = ("--corpus", corpus, "--model", model, "--cache", tmp_path / cache, "--chunk-tokens", "34")
        return command("precompute", *options, *arguments)

    return run


def test_the_hottest_beginnings_of_a_log_come_first(settings, chunks, log):
    with open_run(settings(log=log(ORDERS))) as run:
        found = [(one.chunks, one.uses) for one in run.todo]
        assert found == [(len(order), uses) for order, uses in HOT]
        system, first, second, _ = run.todo
        assert [one.start for one in run.todo[:3]] == [0, system.tokens, system.tokens + first.tokens]
        assert second.tokens > 20
        assert run.left_out == 0


def test_a_second_run_has_nothing_to_do(precompute, log):
    result = precompute("--log", log(ORDERS))
    assert result.exit_code == 0, result.output
    assert "4 new, 0 kept, 0 forgotten" in result.stdout
    assert "7 prompts; beginnings of 2 or more" in result.stdout
    assert "encoded 4 beginnings" in result.stdout
    assert "0 new, 4 kept, 0 forgotten" in precompute("--log", log(ORDERS)).stdout


def test_ask_reuses_from_the_disk_what_the_log_had(precompute, command, corpus, hybrid, tmp_path):
    def ask(cache):
        options = ("--corpus", corpus, "--model", hybrid, "--cache", tmp_path / cache, "--chunk-tokens", "34")
        out = command("ask", *options, "--max-new-tokens", "2", "-k", "2", "Where was he born?").stdout
        return [int(n) for n in re.findall(r": (\d+) reused from tree:disk \((\d+) exactly\)", out)[0]]

    (tmp_path / "own.jsonl").write_text("Where was he born?\n")
    assert "1 new" in precompute(cache="system").stdout
    assert "3 new" in precompute("--log", tmp_path / "own.jsonl", "--min-uses", "1", "-k", "2").stdout
    (system, exactly), (hot, exactly_hot) = ask("system"), ask("cache")
    assert (system, hot) == (exactly, exactly_hot)
    assert hot > system + 20


def test_a_dry_run_says_how_much_and_writes_nothing(precompute, settings, log, tmp_path, monkeypatch):
    result = precompute("--log", log(ORDERS), "--dry-run")
    assert result.exit_code == 0, result.output
    assert "it would be: 4 new, 0 kept, 0 forgotten" in result.stdout
    assert not (tmp_path / "cache").exists()
    with open_run(settings(log=log(ORDERS))) as run:
        said = run.todo_bytes
        run.run()
    files = (tmp_path / "cache" / "kv" / "tree").glob("*.safetensors")
    assert sum(file.stat().st_size for file in files) == pytest.approx(said, rel=0.25)


def test_without_a_log_it_is_the_system_text(precompute):
    result = precompute()
    assert "none (--log): the system text alone" in result.stdout
    assert "encoded 1 beginning " in result.stdout


def test_what_has_no_room_is_left_out_the_coldest_first(settings, log):
    with open_run(settings(log=log(ORDERS))) as run:
        sizes = [run.nbytes(one) for one in run.todo]
    with open_run(settings(log=log(ORDERS), disk_gb=(sum(sizes[:2]) + 100) / 1e9)) as run:
        assert (len(run.todo), run.left_out) == (2, 2)
        assert "2 have no room (--disk-gb)" in run.rows["to compute"]


def test_a_document_that_is_gone_is_forgotten(precompute, corpus, tmp_path, log, chunks):
    mine = tmp_path / "mine"
    shutil.copytree(corpus, mine)
    assert "4 new" in precompute("--log", log(ORDERS), "--corpus", mine).stdout
    (mine / chunks[0].source).unlink()
    gone = sum(chunk.source == chunks[0].source for chunk in chunks)
    rest = log([order for order in ORDERS if order[0] >= gone])
    result = precompute("--log", rest, "--corpus", mine)
    assert f"0 new, 2 kept, {gone} forgotten" in result.stdout


def test_answers_are_those_of_the_bare_model(settings, chunks, log):
    with open_run(settings(log=log(ORDERS))) as run:
        run.run()
    with RagCache.from_pretrained(settings().model, store=StoreConfig(disk_path=settings().folder.kv)) as rag:
        texts = [chunks[i].text for i in (0, 1, 4)]
        rag.register(texts)
        prompt = PromptMaker(rag.tokenizer).filled(SEPARATOR.join(texts), "Who?")
        options = {"max_new_tokens": 8, "do_sample": False}
        answer = rag.generate(prompt, **options)
        assert answer.report.link.uses[0].source == "tree:disk"
        assert answer.report.link.exact_tokens > 60
        assert answer.token_ids == rag.generate(prompt, policy="full", namespace="other", **options).token_ids


@pytest.mark.parametrize("option", ["--ray", "--shared"])
def test_what_is_for_linked_chunks_is_one_line(precompute, option, tmp_path, monkeypatch):
    monkeypatch.setenv("RAGCACHEKIT_KEY", "0" * 64)
    result = precompute(option, *([f"file://{tmp_path}/tier"] if option == "--shared" else []))
    assert result.exit_code == 2
    assert "--ray and --shared are for linked chunks; this model's grade is prefix" in " ".join(
        result.output.split()
    )


def test_a_log_on_a_linked_model_is_noted(precompute, log):
    result = precompute("--log", log(ORDERS), "--dry-run", model=READER)
    assert result.exit_code == 0
    assert "--log is not used: this model's chunks are linked" in " ".join(result.output.split())


def test_a_prompt_without_chunks_has_no_beginning(hybrid):
    with RagCache.from_pretrained(hybrid) as rag:
        assert count_beginnings([rag.prepare("Why is the sky blue, and the sea as well?")]) == []
