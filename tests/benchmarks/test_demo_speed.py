"""The demo's table of speeds, with a handful of chunks, a tiny model and embeddings that count words."""

import zlib

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings
from transformers import AutoTokenizer

from benchmarks.demo import manual, manual_search
from benchmarks.demo import speed as demo_speed
from ragcachekit.commands.bench.timing import open_engines
from ragcachekit.commands.embedding import model_folder
from ragcachekit.errors import RagCacheError

TOPICS = ("argument command line", "csv file", "program output", "digest hash", "thread pool", "date time")


class CountedWords(Embeddings):
    """The interface of MiniLM, with hashed word counts for embeddings."""

    def __init__(self):
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder())
        self.embedded = 0

    def embed(self, texts, *, progress=False):
        self.embedded += len(texts)
        rows = np.full((len(texts), 64), 1e-3, np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in text.lower().split():
                row[zlib.crc32(word.encode()) % 64] += 1
        return rows

    def embed_documents(self, texts):
        return self.embed(texts).tolist()

    def embed_query(self, text):
        return self.embed([text])[0].tolist()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def embedder():
    return CountedWords()


@pytest.fixture
def short_manual(monkeypatch):
    """Two pages on each topic, of some 80 words."""

    def page(topic, number):
        return "\n\n".join(f"Page {number} says of {topic} the thing number {n}." for n in range(12))

    pages = [(f"{topic.split()[0]}{number}", page(topic, number)) for topic in TOPICS for number in (1, 2)]
    monkeypatch.setattr(manual, "pages", lambda: pages)


@pytest.fixture
def texts(embedder, short_manual):
    return demo_speed.manual_texts(embedder.tokenizer, full=False)


@pytest.mark.usefixtures("short_manual")
def test_the_table_is_measured_through_the_chain(embedder, tmp_path):
    report = demo_speed.run(
        cache_dir=tmp_path, prompt_tokens=600, runs=2, shape="tiny", embedder=embedder, progress=False
    )
    assert [(row["policy"], row["state"], row["tier"], row["runs"]) for row in report.rows] == [
        ("full", "-", "none", 2),
        ("lego:16", "cold", "none", 2),
        *((policy, "warm", tier, 8) for tier in ("host", "disk") for policy in ("lego:16", "reuse")),
    ]
    full = report.rows[0]["ttft_ms"]
    for row in report.rows:
        assert 300 < row["prompt_tokens"] <= 600
        assert 0 < row["ttft_ms_min"] <= row["ttft_ms"] <= row["ttft_ms_max"]
        assert row["speedup"] == pytest.approx(full / row["ttft_ms"])
        assert (0 < row["recompute_ratio"] < 1) == (row["policy"] == "lego:16" and row["state"] == "warm")
    assert "random weights" in report.model
    assert "timing only" in report.model


@pytest.mark.usefixtures("short_manual")
def test_quick_asks_less(embedder, tmp_path):
    report = demo_speed.run(cache_dir=tmp_path, quick=True, shape="tiny", embedder=embedder, progress=False)
    assert [row["runs"] for row in report.rows] == [1, 1, 3, 3, 3, 3]


@pytest.mark.parametrize(("options", "what"), [({"runs": 0}, "runs"), ({"prompt_tokens": 100}, "room")])
@pytest.mark.usefixtures("short_manual")
def test_numbers_that_are_too_small_are_refused(embedder, tmp_path, options, what):
    with pytest.raises(ValueError, match=what):
        demo_speed.run(cache_dir=tmp_path, shape="tiny", embedder=embedder, progress=False, **options)


def test_the_retriever_finds_the_topic_and_keeps_to_the_room(embedder, texts, tmp_path):
    retriever = manual_search.manual_retriever(embedder, texts, 500, tmp_path)
    found = [document.page_content for document in retriever.invoke("thing of digest hash says page")]
    count = manual_search.bare_count(embedder.tokenizer)
    assert sum(map(count, found)) <= 500
    assert {text.splitlines()[0] for text in found[:2]} == {"digest1", "digest2"}
    assert len(found) == len(set(found)) > 1


def test_chunks_fit_the_embedding_model(embedder, texts):
    assert max(len(embedder.tokenizer(text).input_ids) for text in texts) <= manual.MAX_WORDPIECES


def test_embeddings_are_kept_by_content(texts, tmp_path):
    embedder = CountedWords()
    rows = manual_search.cached_embeddings(embedder, texts, tmp_path)
    again = manual_search.cached_embeddings(embedder, texts, tmp_path)
    assert embedder.embedded == len(texts)
    assert np.array_equal(rows, again)
    manual_search.cached_embeddings(embedder, texts[:-1], tmp_path)
    assert embedder.embedded == 2 * len(texts) - 1
    assert len(list(tmp_path.glob("*"))) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda path, rows: path.write_bytes(path.read_bytes()[:100]),
        lambda path, rows: path.write_bytes(b""),
        lambda path, rows: np.save(path, rows[:-1]),
        lambda path, rows: np.save(path, rows * np.nan),
        lambda path, rows: np.save(path, np.array([{"a": 1}], object), allow_pickle=True),
    ],
    ids=["cut", "empty", "rows missing", "nan", "pickled"],
)
def test_a_damaged_file_of_embeddings_is_computed_again(texts, tmp_path, damage):
    embedder = CountedWords()
    rows = manual_search.cached_embeddings(embedder, texts, tmp_path)
    (path,) = tmp_path.glob("*.npy")
    damage(path, rows)
    assert np.array_equal(manual_search.cached_embeddings(embedder, texts, tmp_path), rows)
    assert embedder.embedded == 2 * len(texts)
    assert np.array_equal(np.load(path), rows)


def test_a_chunk_that_was_not_served_from_the_tier_is_no_sample(embedder, texts):
    from ragcachekit.commands.bench.shapes import random_model
    from ragcachekit.commands.bench.timing import Timings

    prompt = demo_speed.PROMPT.format(context="\n\n".join(texts[:2]), question="why?")
    with open_engines(random_model("tiny"), ("host",), embedder.tokenizer) as engines:
        warm = engines.warm["host"]
        with pytest.raises(RagCacheError, match="expected chunks"):  # not registered, so not found
            demo_speed._ask(warm, prompt, Timings("reuse", "host"))
        warm.register(texts)
        with pytest.raises(RagCacheError, match="computed"):  # found, and not in the store
            demo_speed._ask(warm, prompt, Timings("reuse", "host"))
        engines.filler.encode(texts[:2])
        engines.filler.generate(prompt, max_new_tokens=1)
        sample = Timings("reuse", "host")
        demo_speed._ask(warm, prompt, sample)
        assert len(sample.samples) == 1
