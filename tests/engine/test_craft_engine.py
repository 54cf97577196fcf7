"""``in-prompt`` and Cache-Craft through the facade."""

import pytest
import torch

from engine_kit import RecordingStore, chunk, ids, rag_for, text
from families import greedy, plain
from ragcachekit import Prompt
from ragcachekit.config import StoreConfig
from ragcachekit.encode.in_prompt import InPromptEncoder
from ragcachekit.types import chunk_id

ASKED = {"max_new_tokens": 8, "do_sample": False}
SEP = text(1, 20)
FIRST = Prompt([text(9, 1), chunk(33, 2), SEP, chunk(25, 3), SEP, chunk(20, 5), text(6, 4)])
SECOND = Prompt([text(9, 1), chunk(20, 5), SEP, chunk(33, 2), SEP, chunk(25, 3), text(6, 8)])
POLICIES = ["craft:0.5", "craft:2", "craft-focused:1"]


def warmed(name="llama", **options):
    rag = rag_for(name, encoder="in-prompt", policy="craft:1", **options)
    rag.generate(FIRST, max_new_tokens=1)
    return rag


@pytest.mark.parametrize("name", ["llama", "phi3-longrope"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_repeated_prompt_is_the_models_own_answer(name, policy):
    rag = warmed(name)
    answer = rag.generate(FIRST, policy=policy, **ASKED)
    assert answer.token_ids == greedy(plain(name), ids(FIRST), 8)
    report = answer.report.link
    assert (report.recompute_ratio, report.approximate_tokens, report.exact_tokens) == (0, 0, 87)
    assert all(use.exact for use in report.uses)


def test_a_context_that_costs_too_much_gets_a_variant_of_its_own():
    rag = warmed()
    other = Prompt([text(7, 30), chunk(40, 31), SEP, chunk(33, 2), text(6, 4)])
    first = rag.generate(other, **ASKED).report.link
    assert 0 < first.recomputed_tokens < 33
    again = rag.generate(other, **ASKED)
    assert again.report.link.recompute_ratio == 0
    assert again.token_ids == greedy(plain("llama"), ids(other), 8)


def test_forgetting_follows_the_context():
    rag = warmed()
    first = chunk_id(FIRST.segments[1].token_ids, "default")
    assert rag.forget([first]) == 3  # itself, and the two that were encoded behind it
    report = rag.generate(SECOND, **ASKED).report.link
    assert [use.source for use in report.uses] == ["host", "computed", "computed", "computed"]


def test_a_restart_finds_variants(tmp_path):
    config = StoreConfig(disk_path=tmp_path / "kv")
    with warmed(store=config):
        pass
    with rag_for("llama", encoder="in-prompt", policy="craft:1", store=config, cold="never") as rag:
        second = rag.generate(SECOND, **ASKED).report.link
        assert {use.source for use in second.uses} == {"disk"}
        assert 0 < second.recompute_ratio < 1


def asked(folder, cold, *numbers):
    """Exact tokens of prompts with a chunk each, over a pool with room for three."""
    store = StoreConfig(host_bytes=0, disk_path=folder, disk_bytes=138_000)
    options = {"encoder": "in-prompt", "policy": "craft:1", "load": "always"}
    with rag_for("llama", store=store, cold=cold, **options) as rag:
        prompts = [Prompt([text(9, 1), chunk(40, number), text(6, 4)]) for number in numbers]
        return [rag.generate(prompt, max_new_tokens=1).report.link.exact_tokens for prompt in prompts]


def test_after_a_restart_the_variant_of_the_fewest_uses_is_evicted_all_the_same(tmp_path):
    before = 1, 2, 3, 1, 1, 1, 2, 3, 3
    asked(tmp_path / "one", "now", *before, 4)
    for folder in ("two", "lost"):
        asked(tmp_path / folder, "now", *before)
    for database in (tmp_path / "lost" / "uses").iterdir():
        database.write_bytes(b"damaged")
    asked(tmp_path / "lost", "now", 4)
    asked(tmp_path / "two", "now", 4)
    left = {folder: asked(tmp_path / folder, "never", 1, 2, 3, 4) for folder in ("one", "two", "lost")}
    assert left["one"] == left["two"] == [49, 9, 49, 49]
    assert left["lost"] == [49, 49, 9, 49], "the last one, as without counts"


@pytest.fixture
def second_runs(monkeypatch):
    """Tokens of the chunks for which a prompt runs once more behind the answer."""
    runs, forward = [], InPromptEncoder.forward

    def counted(self, run, *options):
        runs.append([len(item.token_ids) for item in run])
        return forward(self, run, *options)

    monkeypatch.setattr(InPromptEncoder, "forward", counted)
    return runs


GROWN = Prompt([text(9, 1), chunk(33, 2), SEP, chunk(25, 3), SEP, chunk(28, 6), text(6, 4)])
"""Begins as ``FIRST`` does; its last chunk is missing behind nothing but exact rows."""


@pytest.mark.parametrize("cold", ["now", "background"])
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_what_a_request_computed_does_not_run_a_second_time(name, cold, second_runs):
    """And is what the encoder's own forward computes, the sums too; behind exact cached rows as well."""
    stores = RecordingStore(), RecordingStore()
    for store, often in zip(stores, (1, 2), strict=True):
        with rag_for(name, encoder="in-prompt", policy="craft:1", store=store, cold=cold) as rag:
            for prompt in (FIRST, GROWN):
                if often == 1:
                    rag.generate(prompt, max_new_tokens=3)
                else:  # twice: the background encodes what was missed a second time
                    rag.link(prompt), rag.link(prompt)
                assert rag.flush(60)
            if often == 1:
                assert second_runs == []
                assert rag.generate(GROWN, **ASKED).token_ids == greedy(plain(name), ids(GROWN), 8)
    assert [sorted(run) for run in second_runs] == [[20, 25, 33], [28]]
    own, encoded = (store.originals for store in stores)
    assert own.keys() == encoded.keys()
    for key, (kv, _) in own.items():
        other = encoded[key][0]
        pairs = [*zip((*kv.keys, *kv.values), (*other.keys, *other.values), strict=True)]
        assert set(kv.sums) == set(other.sums)
        pairs += [(kv.sums[sum], other.sums[sum]) for sum in kv.sums]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
