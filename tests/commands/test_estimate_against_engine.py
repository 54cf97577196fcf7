"""What `estimate` says against what the engine really does with the same log, on the reader."""

import json
import shutil
from collections import Counter

import pytest

from benchmarks.world.reader_folder import READER
from command_fixtures import kv_of
from ragcachekit import RagCache, StoreConfig
from ragcachekit.commands.ask import AskSession, AskSettings, CorpusSearch
from ragcachekit.commands.corpus import read_corpus
from ragcachekit.commands.estimate.run import EstimateSettings, run
from ragcachekit.commands.estimate.speed import assumed_profile
from ragcachekit.commands.precompute.run import PrecomputeSettings, open_run
from ragcachekit.commands.reading_prompt import prompt_for
from ragcachekit.config import LoadConfig
from ragcachekit.model.prefill_timing import PrefillCost
from ragcachekit.model.pretrained import load_model

SMALL = 34


@pytest.fixture(scope="module")
def reader():
    return load_model(READER, "cpu")


@pytest.fixture
def log(world, tmp_path):
    """Popular questions come back: the n-th of 12 asked about 1/n as often as the first."""
    questions = [question.text for question in world.questions[:12]]
    asked = [questions[turn % (1 + turn % 12)] for turn in range(24)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"question": query}) + "\n" for query in asked))
    return path


@pytest.fixture
def estimated(log, corpus, one_minilm, prepared, tmp_path):
    """The estimate of one set of tiers: its outcome, and all of it."""
    shutil.copytree(prepared, tmp_path / "cache")

    def estimate(pick, **changes):
        options = {"shares": (0.2,), "evictions": ("pgdsf",), "measure": False, **changes}
        settings = EstimateSettings(
            str(corpus),
            READER,
            log=str(log),
            cache=str(tmp_path / "cache"),
            chunk_tokens=SMALL,
            **options,
        )
        found = run(settings)
        (outcome,) = [o for o in found.outcomes if (o.tiers.disk, o.tiers.precomputed) == pick]
        return found, outcome

    return estimate


@pytest.fixture
def really(log, corpus, reader, one_minilm, tmp_path, monkeypatch):
    """The session of `ask` over the log: tiers of all its segments in order, and the store's last counts."""
    # Eviction weighs measured prefill times; those that the estimate assumes come out the same every time.
    profile = assumed_profile(reader[0])
    monkeypatch.setattr(
        PrefillCost, "seconds", lambda _, cached, new, share=0.0: profile.seconds(cached, new)
    )

    def ask_all(store, *, k=4, policy="lego:16", encoder=None, ahead=False):
        model, tokenizer = reader
        chunks = read_corpus(corpus, chunk_tokens=SMALL, tokenizer=tokenizer)
        settings = AskSettings(str(corpus), READER, cache=str(tmp_path / "cache"), k=k)
        options = {"policy": policy, "encoder": encoder, "cache_dir": tmp_path / "cache"}
        if ahead:
            onto = StoreConfig(host_bytes=0, disk_path=store.disk_path)
            with RagCache(model, tokenizer, store=onto, cold="never", **options) as rag:
                rag.encode(chunks.texts, system=prompt_for(tokenizer).before)
        with RagCache(
            model, tokenizer, store=store, cold="now", load=LoadConfig("always", threads=1), **options
        ) as rag:
            # What is read ahead is promoted in an order that depends on the threads' timing.
            rag.prefetch = lambda *_, **__: None
            session = AskSession(rag, CorpusSearch(settings, chunks, lambda _: None), 1)
            tiers = []
            for line in log.read_text().splitlines():
                report = session.ask(json.loads(line)["question"]).report["link"]
                rag.flush()
                uses = [*([report["prefix"]] if report["prefix"] else []), *report["chunks"]]
                tiers.append(tuple(use["source"] for use in uses))
            return tiers, {record.tier: record for record in rag.stats()}

    return ask_all


def counted(tiers):
    return Counter(tier for each in tiers for tier in each)


def tiers_of(outcome):
    return [served.tiers for served in outcome.served]


@pytest.mark.parametrize("eviction", ["lru", "pgdsf"])
def test_a_tight_host_tier(estimated, really, eviction):
    _, outcome = estimated((False, False), evictions=(eviction,))
    tiers, _ = really(StoreConfig(host_bytes=outcome.tiers.host_bytes, eviction=eviction))
    assert counted(tiers).keys() == {"host", "computed"}
    assert tiers_of(outcome) == tiers


def test_a_corpus_encoded_ahead_on_the_disk(estimated, really, tmp_path):
    _, outcome = estimated((True, True))
    store = StoreConfig(host_bytes=outcome.tiers.host_bytes, disk_path=tmp_path / "kv")
    tiers, _ = really(store, ahead=True)
    assert min(counted(tiers)["host"], counted(tiers)["disk"]) > 10
    assert tiers_of(outcome) == tiers


def test_host_and_disk_from_nothing(estimated, really, tmp_path):
    """One chunk per prompt, so that what is read and what is stored cannot come in either order."""
    _, outcome = estimated((True, False), k=1, shares=(0.5,))
    store = StoreConfig(host_bytes=outcome.tiers.host_bytes, disk_path=tmp_path / "kv")
    tiers, _ = really(store, k=1)
    assert counted(tiers).keys() == {"host", "disk", "computed"}
    assert tiers_of(outcome) == tiers


@pytest.mark.parametrize("encoder", ["sinks:4", "system"])
def test_bytes_of_what_is_touched_are_those_that_are_stored(estimated, really, encoder):
    found, outcome = estimated((False, False), shares=(1.0,), encoder=encoder)
    tiers, stats = really(StoreConfig(host_bytes=1 << 30), encoder=encoder)
    assert found.log["kv_bytes_touched"] == stats["host"].nbytes
    assert tiers_of(outcome) == tiers
    assert found.log["chunks_touched"] + 1 == stats["host"].entries  # and the text before the first chunk


def test_bytes_of_the_corpus_are_those_that_are_stored(estimated, corpus, tmp_path):
    found, _ = estimated((True, True))
    settings = PrecomputeSettings(str(corpus), READER, cache=str(tmp_path / "other"), chunk_tokens=SMALL)
    with open_run(settings) as opened:
        opened.run()
    stored = [kv.nbytes for kv in kv_of(settings.folder.kv)]
    assert (found.log["chunks_in_corpus"], found.log["kv_bytes_corpus"]) == (len(stored), sum(stored))
