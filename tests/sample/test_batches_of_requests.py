"""Requests decoded together on a pretrained model, against its own generate and one at a time."""

from __future__ import annotations

import pytest
import torch
from texts import DOCUMENTS, QUESTIONS, SYSTEM

from batch_kit import begin, decoder_for, finish
from ragcachekit import Chunk, Prompt, Text


def prompt_of(order, question):
    parts = [Text(SYSTEM)]
    for number in order:
        parts += [Chunk(DOCUMENTS[number]), Text("\n\n")]
    return Prompt([*parts, Text(f"Question: {question}\nAnswer:")])


PROMPTS = [prompt_of((2, 0, 1), QUESTIONS[0]), prompt_of((1,), QUESTIONS[1]), prompt_of((0, 2), QUESTIONS[0])]
LENGTHS = (16, 5, 11)


def together(rag, policy):
    """The second joins after two steps, and leaves before the others end."""
    decoder, out = decoder_for(rag), []
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        out.append(begin(decoder, rag, prompt, policy=policy, max_new_tokens=length, pad_token_id=2))
        decoder.step()
        decoder.step()
    finish(decoder)
    return [decoding.generated().token_ids for decoding in out]


def test_full_is_the_models_own_generate(rag, loaded):
    model, _ = loaded
    expected = []
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        token_ids = rag.link(prompt).input_ids
        mask = torch.ones_like(token_ids)
        asked = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 2}
        out = model.generate(token_ids, attention_mask=mask, **asked)
        expected.append(tuple(out[0, token_ids.shape[1] :].tolist()))
    assert together(rag, "full") == expected


@pytest.mark.parametrize("policy", ["reuse", "impact:0.2"])
def test_policies_are_as_one_at_a_time(rag, policy):
    rag.encode(list(DOCUMENTS))
    alone = [
        rag.generate(prompt, policy=policy, max_new_tokens=length, do_sample=False).token_ids
        for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
    ]
    assert together(rag, policy) == alone
