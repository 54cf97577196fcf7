"""The invariants of reuse on a pretrained model, against the model's own forward."""

import pytest
import torch
from texts import DOCUMENTS, QUESTIONS, SYSTEM
from transformers import DynamicCache

from ragcachekit import Chunk, Prompt, RagCache, Text
from soak_kit import soaked

RELATIVE = 1e-5  # of the greatest logit or key: float32 sums in another order


def prompt_of(order, question):
    parts = [Text(SYSTEM)]
    for number in order:
        parts += [Chunk(DOCUMENTS[number]), Text("\n\n")]
    return Prompt([*parts, Text(f"Question: {question}\nAnswer:")])


def off(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


@torch.no_grad()
def own(model, ids, positions=None):
    cache = DynamicCache()
    where = torch.arange(ids.shape[1]) if positions is None else positions
    return model(ids, position_ids=where[None], past_key_values=cache, use_cache=True).logits[0], cache


@torch.no_grad()
def last_logits(model, linked):
    return model.generate(
        **linked.inputs,
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    ).logits[0][0]


@pytest.mark.parametrize("question", [QUESTIONS[0], pytest.param(QUESTIONS[1], marks=pytest.mark.soak)])
def test_everything_recomputed_is_an_ordinary_prefill(rag, loaded, question):
    model, _ = loaded
    rag.encode([DOCUMENTS[0], DOCUMENTS[2]])
    prompt = prompt_of((2, 0), question)
    ids = rag.link(prompt, policy="full").input_ids
    options = {"max_new_tokens": 4, "do_sample": False}
    greedy = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pad_token_id=2,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    for policy in ("full", "lego:100000"):
        linked = rag.link(prompt, policy=policy)
        assert torch.equal(linked.input_ids, ids)
        assert off(last_logits(model, linked), greedy.logits[0][0]) <= RELATIVE
        answer = rag.generate(prompt, policy=policy, **options)
        assert list(answer.token_ids) == greedy.sequences[0, ids.shape[1] :].tolist()
        assert answer.report.link.approximate_tokens == 0


def test_a_chunk_behind_its_encoding_context_needs_nothing_recomputed(loaded, digests):
    model, _ = loaded
    with RagCache(*loaded, policy="reuse", encoder="system", cold="now", cache_dir=digests) as rag:
        prompt = prompt_of((0,), QUESTIONS[0])
        rag.encode([DOCUMENTS[0]], prompt=prompt)
        linked = rag.link(prompt)
        assert linked.report.reused_tokens >= rag.count_tokens(DOCUMENTS[0])
        expected, _ = own(model, linked.input_ids)
        assert off(last_logits(model, linked), expected[-1]) <= RELATIVE


@pytest.mark.parametrize("ahead", soaked((1, 57, 900), 57))
def test_a_linked_chunk_is_the_chunk_run_at_those_positions(rag, loaded, ahead):
    model, tokenizer = loaded
    rag.encode([DOCUMENTS[1]])
    filler = tuple(tokenizer("the sea ").input_ids * ahead)[:ahead]
    linked = rag.link(
        Prompt([Text(token_ids=filler), Chunk(DOCUMENTS[1]), Text(f"\n\n{QUESTIONS[1]}")]), policy="reuse"
    )
    stop = ahead + len(tokenizer(DOCUMENTS[1]).input_ids)
    _, cache = own(model, linked.input_ids[:, ahead:stop], torch.arange(ahead, stop))
    turned = RELATIVE + stop * 2**-24  # the model rounds an angle of so many radians to float32
    for ours, theirs in zip(linked.cache.layers, cache.layers, strict=True):
        assert off(ours.keys[0, :, ahead:stop], theirs.keys[0]) <= turned
        assert off(ours.values[0, :, ahead:stop], theirs.values[0]) <= turned
