"""``sensitive:r``: positions by stored sensitivity alone, against a slow derivation."""

import math
import random

import pytest
import torch

from ragcachekit.policies.base import PlacedChunk
from ragcachekit.policies.registry import open_policy


def placed(start, tokens, seed=None, exact=False):
    sums = {} if seed is None else {"sensitivity": torch.rand(3, tokens, generator=torch.manual_seed(seed))}
    return PlacedChunk(f"chunk {start}", start, tokens, exact, sums=sums)


def slow(chunks, ratio):
    """The same by sorting pairs."""
    known = [c for c in chunks if not c.is_exact and c.sums]
    unknown = [c for c in chunks if not c.is_exact and not c.sums]
    room = math.ceil(round(ratio * sum(c.tokens for c in known), 6))
    ranked = []
    for chunk in known:
        for row in range(chunk.tokens):
            score = float(sum(layer[row] for layer in chunk.sums["sensitivity"]))
            ranked.append((row >= 2, chunk.start + row if row < 2 else -score, chunk.start + row))
    picked = {position for *_, position in sorted(ranked)[:room]}
    for chunk in unknown:
        picked |= set(range(chunk.start, chunk.start + math.ceil(round(ratio * chunk.tokens, 6))))
    return picked


@pytest.mark.parametrize("seed", range(20))
def test_first_tokens_then_the_most_sensitive_within_the_share(seed):
    rng, start, chunks = random.Random(seed), 5, []
    for number in range(rng.randint(1, 5)):
        tokens = rng.randint(1, 40)
        known = rng.random() < 0.7
        chunks.append(placed(start, tokens, 10 * seed + number if known else None, rng.random() < 0.2))
        start += tokens + rng.randint(0, 3)
    for ratio in (0.01, 0.1, 0.5, 1.0):
        found = open_policy(f"sensitive:{ratio}").select(chunks)
        assert len(found) == len(set(found))
        assert set(found) == slow(chunks, ratio)


def test_rows_of_long_prompts_grow_with_the_fourth_root():
    policy = open_policy("sensitive:0.1")
    chosen = {
        n: len(policy.select([placed(0, n // 2, 1), placed(n // 2, n // 2, 2)])) for n in (512, 2048, 8192)
    }
    assert chosen == {512: 52, 2048: 73, 8192: 103}
    assert len(open_policy("sensitive:1").select([placed(0, 2048, 1)])) == 2048


def test_exact_chunks_alone_need_nothing():
    assert open_policy("sensitive:0.1").select([placed(4, 30, 1, exact=True)]) == []


def test_what_questions_looked_at_weighs():
    """The square root of the attention, relative to the chunk's mean, times the sensitivity, over layers."""
    chunk = placed(0, 40, 1)
    asked = torch.rand(3, 40, generator=torch.manual_seed(7)) ** 4
    other = PlacedChunk("a", 0, 40, False, sums={**chunk.sums, "asked": asked})
    found = open_policy("sensitive:0.25").select([other])
    scores = (chunk.sums["sensitivity"] * asked.sqrt()).sum(0).tolist()
    assert set(found) == {0, 1, *sorted(range(2, 40), key=lambda p: -scores[p])[:8]}
    assert set(found) != set(open_policy("sensitive:0.25").select([chunk]))


def test_attention_of_more_layers_than_have_kv_is_left_out():
    chunk = placed(0, 40, 1)
    other = PlacedChunk("a", 0, 40, False, sums={**chunk.sums, "asked": torch.rand(5, 40)})
    policy = open_policy("sensitive:0.25")
    assert policy.select([other]) == policy.select([chunk])


def test_without_sensitivity_what_questions_looked_at_decides():
    asked = torch.zeros(3, 40)
    asked[:, [17, 23]] = 1.0
    chunk = PlacedChunk("a", 0, 40, False, sums={"asked": asked})
    assert set(open_policy("sensitive:0.1").select([chunk])) == {0, 1, 17, 23}


def test_a_chunk_that_no_question_saw_counts_by_its_sensitivity():
    unseen, seen = placed(0, 20, 1), placed(20, 20, 2)
    asked = {"asked": torch.zeros(3, 20)}
    one = PlacedChunk("a", 0, 20, False, sums={**unseen.sums, **asked})
    policy = open_policy("sensitive:0.5")
    assert policy.select([one, seen]) == policy.select([unseen, seen])
