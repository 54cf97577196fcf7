"""ragcachekit estimate: the shares that it prints, against a session of ask, and when it says no."""

import json
import math
import shutil

import pytest

from benchmarks.world.reader_folder import READER
from ragcachekit.commands.ask import open_session
from ragcachekit.commands.corpus import read_corpus
from ragcachekit.commands.estimate import balance, break_even, kv_bytes_per_token, replay
from ragcachekit.commands.workspace import OwnFiles, load_tokenizer
from ragcachekit.model.kv import KVLayout
from ragcachekit.model.loading import load_model


@pytest.fixture
def log(tmp_path):
    def write(*lines):
        path = tmp_path / "log.jsonl"
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return path

    return write


@pytest.fixture
def estimate(command, corpus, one_minilm, prepared, log, tmp_path):
    """Run it over the lines of a log; the result, and the JSON's rows by part."""
    shutil.copytree(prepared, tmp_path / "cache")

    def run(lines, *arguments):
        out = tmp_path / "out.json"
        out.unlink(missing_ok=True)
        result = command(
            *("estimate", "--log", log(*lines), "--corpus", corpus, "--model", READER),
            *("--cache", tmp_path / "cache", "--chunk-tokens", "34", "--json", out, *arguments),
        )
        found = json.loads(out.read_text()) if out.exists() else {"rows": []}
        rows = found["rows"]
        return result, next(iter(rows), None), [row for row in rows if row["part"] == "sizes"]

    return run


@pytest.fixture
def chunks(corpus):
    return read_corpus(corpus, chunk_tokens=34, tokenizer=load_tokenizer(READER)).chunks


def test_a_log_that_repeats_itself_is_helped(estimate, chunks):
    long = [" ".join(c.text for c in chunks[i : i + 8]) for i in (0, 8)]
    result, summary, sizes = estimate([{"question": f"Question {n % 3}?", "chunks": long} for n in range(12)])
    assert result.exit_code == 0, result.output
    assert summary["helps"]
    assert "it will save you time" in result.stdout
    assert (summary["questions"], summary["chunk_uses"], summary["chunks_used"]) == (12, 24, 2)
    assert summary["searches_saved"] == 9 / 12
    assert summary["break_even"] == 2
    assert "fewer from question 2 on" in result.stdout
    assert sizes[-1]["tokens_found"] == pytest.approx(11 / 12 * summary["chunk_token_share"])
    assert sizes[-1]["after_precompute"] == sizes[-1]["tokens_found"]  # these texts are not in the corpus
    assert summary["chunks_not_in_corpus"] == 2


def test_the_share_is_that_of_a_session_of_ask(estimate, world, corpus, one_minilm, tmp_path):
    """Tokens that span the edge of a chunk are computed, so the engine reuses one or two fewer per chunk."""
    asked = [question.text for question in world.questions[:6]] * 2
    _, summary, sizes = estimate(asked)
    settings = OwnFiles(
        str(corpus),
        READER,
        policy="reuse",
        encoder="standalone",
        cache=str(tmp_path / "cache"),
        chunk_tokens=34,
    )
    reused = total = hits = uses = 0
    with open_session(settings) as session:
        session.rag.flush()
        for question in asked:
            reply = session.ask(question)
            session.keep()
            link = reply.answer.report.link
            reused += sum(use.tokens for use in link.chunks if use.source != "computed")
            uses += len(link.chunks)
            total += link.prompt_tokens
            hits += reply.found.hit
    assert summary["searches_saved"] == hits / len(asked) == 0.5
    assert reused / total <= sizes[-1]["tokens_found"] <= (reused + 2 * uses) / total


def test_chunks_that_never_come_back_are_not_helped(estimate, chunks):
    texts = [f"Note {n}. {chunk.text}" for n, chunk in enumerate(chunks[:16])]
    result, summary, _ = estimate(
        [{"question": "Why?", "chunks": texts[:8]}, {"question": "Who?", "chunks": texts[8:]}]
    )
    assert result.exit_code == 0
    assert not summary["helps"]
    assert "it will not help you: 0%" in result.stdout
    assert "16 of those used not among them" in result.stdout


def test_all_of_a_corpus_once_is_helped_by_precompute_only(estimate, chunks):
    names = [f"{c.source}#{c.number}" for c in chunks]
    log = [{"question": f"Question {n}?", "chunks": names[n : n + 8]} for n in range(0, len(names) - 7, 8)]
    result, summary, _ = estimate(log)
    assert summary["helps"]
    tokenizer = load_tokenizer(READER)
    sizes = {c.text: len(tokenizer(c.text, add_special_tokens=False).input_ids) for c in chunks}
    used = sum(sizes[c.text] for c in chunks[: 8 * len(log)])  # each in one prompt, as all are stored
    computed, questions = summary["precompute_tokens"], summary["precompute_questions"]
    assert computed == 3 * sum(sizes.values())  # three forwards
    assert questions == math.ceil(computed * len(log) / (0.9 * used)) > len(log)
    assert f"only if you run precompute first, and then from question {questions} on" in result.stdout
    assert f"computes {computed} tokens, as many as {questions} such questions save" in result.stdout


def test_no_embedding_where_the_log_names_all_chunks(estimate, chunks, monkeypatch):
    monkeypatch.setattr("ragcachekit.commands.embedding.MiniLM", None)
    named = [{"question": "Why?", "chunks": [f"{c.source}#{c.number}" for c in chunks[:3]]}] * 2
    given = [{"question": "Why?", "chunks": [c.text for c in chunks[:3]]}] * 2
    assert estimate(named)[1:] == estimate(given)[1:]


def test_a_chunk_that_the_corpus_lacks_is_one_line(estimate):
    result, *_ = estimate([{"question": "Why?", "chunks": ["nowhere.txt#0"]}])
    assert result.exit_code == 2
    assert "the corpus has no chunk nowhere.txt#0 of the question 'Why?'" in result.output


def test_the_least_recently_used_chunk_goes_first():
    prompts, sizes = [["a", "b"], ["a", "c"], ["b"], ["a"], ["c"]], dict.fromkeys("abc", 10)
    assert replay(prompts, sizes, 30) == 40
    assert replay(prompts, sizes, 20) == 10  # a alone comes back before it is dropped
    assert replay(prompts, sizes, 20, ahead={"b", "c"}) == 50


def test_the_balance_follows_the_plans_of_prompts():
    """The first prompt computes b, c and d; after the fourth one, c and d get a second context."""
    prompts = [["b", "c", "d"], ["b", "c", "d"], ["b", "c", "d"], ["x", "c", "b", "d"]]
    sizes = dict.fromkeys("bcdx", 100)
    first, second, third, fourth = balance(prompts, sizes, [400, 400, 400, 500], 0.1)
    assert first == 1  # all is new
    reused = 400 - 0.9 * 300
    assert [second, third] == pytest.approx([(400 + reused) / 800, (400 + 2 * reused) / 1200])
    last = 500 - 0.9 * 300 + 200
    assert fourth == pytest.approx((400 + 2 * reused + last) / 1700)
    assert (break_even([first, second, third]), break_even([first, first])) == (2, None)


def test_bytes_of_a_token_are_those_of_the_model():
    assert kv_bytes_per_token(READER) == KVLayout.of(load_model(READER, "cpu")[0]).token_bytes
