"""Sampling with a seed, and processors that only read scores, inside a batch."""

import pytest
import torch
from transformers import LogitsProcessor

from engine_kit import FOLDER
from ragcachekit import RagCache
from speaking import byte_level, speaker

PROMPT = "Where does the river flow?"
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.3, "top_k": 0}


@pytest.fixture(scope="module")
def rag():
    with RagCache(speaker(), byte_level(), policy="reuse", cache_dir=FOLDER.name) as rag:
        yield rag


class Kept(LogitsProcessor):
    def __init__(self):
        self.last, self.scores = [], []

    def __call__(self, input_ids, scores):
        self.last.append(int(input_ids[0, -1]))
        self.scores.append(scores[0].clone())
        return scores


def together(rag, *options):
    requests = [rag.submit(PROMPT, **{**SAMPLED, **one}) for one in options]
    return [request.result(60) for request in requests]


def test_a_seed_repeats_an_answer_whatever_runs_beside_it(rag):
    (alone,) = together(rag, {"seed": 7})
    torch.manual_seed(1)
    again, other, free = together(rag, {"seed": 7}, {"seed": 8}, {})
    assert again.token_ids == alone.token_ids
    assert len({alone.token_ids, other.token_ids, free.token_ids}) == 3
    assert not any("generated alone" in note for note in again.report.link.notes)


def test_a_seed_leaves_the_callers_random_numbers_as_they_are(rag):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    first = rag.generate(PROMPT, seed=5, **SAMPLED)
    assert torch.equal(torch.rand(3), expected)
    assert rag.generate(PROMPT, seed=5, **SAMPLED).token_ids == first.token_ids


def test_an_observer_sees_the_scores_of_every_token_in_a_batch(rag):
    kept = Kept()
    seen, other = together(rag, {"logits_processor": [kept], "do_sample": False}, {})
    assert not any("generated alone" in note for note in seen.report.link.notes)
    assert other.token_ids
    assert [int(scores.argmax()) for scores in kept.scores] == list(seen.token_ids)
    assert kept.last[1:] == list(seen.token_ids[:-1])
    plain = rag.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert seen.token_ids == plain.token_ids
