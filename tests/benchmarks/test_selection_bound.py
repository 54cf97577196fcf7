"""The pieces of the bound on selection, on a tiny model: what exact KV in place of stored KV gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.selection.bound import Continued, LinkedKV, by_answer, by_next_token
from families import wrapped

END, QUESTION, ANSWER = 12, (7, 8, 9), (3, 5, 2)
PROMPT = tuple(range(20, 20 + END))
TOKENS_OFF = (2, 6, 7)


@pytest.fixture
def model() -> Any:
    return wrapped("llama").requires_grad_(False)


@pytest.fixture
def exact(model: Any) -> LinkedKV:
    return LinkedKV.of(model(input_ids=torch.tensor([PROMPT])).past_key_values, END)


@pytest.fixture
def linked(exact: LinkedKV) -> LinkedKV:
    """Wrong at three tokens, most at the second of them."""
    random = torch.Generator().manual_seed(0)
    share = torch.zeros(END)
    share[list(TOKENS_OFF)] = torch.tensor([0.1, 2.0, 0.1])
    noise = LinkedKV(
        *([t + torch.randn(t.shape, generator=random) for t in side] for side in (exact.keys, exact.values))
    )
    return exact.towards(noise, share)


@pytest.fixture
def run(model: Any) -> Continued:
    return Continued(model, QUESTION, END, ANSWER)


def test_exact_kv_continues_as_an_ordinary_prefill(model, run, exact):
    logits = model(input_ids=torch.tensor([[*PROMPT, *QUESTION, *ANSWER]])).logits[0]
    want = logits[END + len(QUESTION) - 1 : -1].log_softmax(-1)
    torch.testing.assert_close(run.log_probs(exact), want, rtol=1e-5, atol=1e-5)
    greedy = model.generate(
        input_ids=torch.tensor([[*PROMPT, *QUESTION]]), max_new_tokens=16, do_sample=False, eos_token_id=None
    )
    assert run.greedy(exact, end=-1) == greedy[0, END + len(QUESTION) :].tolist()


def test_a_share_of_one_is_exact_where_it_is_given(linked, exact):
    share = torch.zeros(END)
    share[6] = 1
    mended = linked.towards(exact, share)
    for one, was, right in zip(mended.values, linked.values, exact.values, strict=True):
        torch.testing.assert_close(one[:, :, 6], right[:, :, 6])
        assert torch.equal(one[:, :, 2], was[:, :, 2])
        assert not torch.equal(was[:, :, 6], right[:, :, 6])


@pytest.mark.parametrize("count", [1, 3])
def test_the_gradient_of_the_answer_finds_the_tokens_that_are_off(run, linked, exact, count):
    full = run.log_probs(exact).detach()
    mask = by_answer(run, linked, exact, full, (END,), count)
    chosen = mask.nonzero().flatten().tolist()
    assert chosen == ([6] if count == 1 else list(TOKENS_OFF))
    before = (full.exp() * (full - run.log_probs(linked))).sum(-1).mean()
    after = (full.exp() * (full - run.log_probs(linked.towards(exact, mask)))).sum(-1).mean()
    assert 0 <= after + 1e-7 < before


def test_pairs_of_a_token_and_a_layer_are_counted_one_by_one(run, linked, exact):
    layers = len(exact.keys)
    full = run.log_probs(exact).detach()
    mask = by_answer(run, linked, exact, full, (layers, END), layers + 1)
    assert mask.shape == (layers, END)
    assert int(mask.sum()) == layers + 1


def test_the_next_tokens_gradient_scores_only_tokens_that_deviate(run, linked, exact):
    scores = by_next_token(run, linked, exact)
    assert scores.shape == (len(exact.keys), END)
    by_token = scores.sum(0)
    assert (by_token > 0).nonzero().flatten().tolist() == list(TOKENS_OFF)
    assert int(by_token.argmax()) == 6
