"""What questions attend to is stored with chunks, ahead and in use; against eager attention."""

import pytest
import torch

from families import build, off, tokens, wrapped
from link_kit import described
from ragcachekit import Chunk, Prompt, RagCache, Text
from ragcachekit.encode.in_prompt import InPromptEncoder
from ragcachekit.forward.attention import install
from ragcachekit.model.encoding import InPromptEncoding
from ragcachekit.plan.link_plan import Missing
from ragcachekit.types import KVKey

SYSTEM, FIRST, SECOND, QUESTION = tokens(9, 1), tokens(14, 2), tokens(17, 3), tokens(6, 9)


@torch.no_grad()
def eager(name, ids, rows, start, stop):
    """``[layers, stop - start]``: attention of the last rows to columns, over heads, mean over rows."""
    model = build(name)
    model.set_attn_implementation("eager")
    layers = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    return torch.stack([layer[0, :, -rows:, start:stop].sum((0, 1)) / rows for layer in layers])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_chunks_encoded_ahead_are_asked_the_probe_which_is_not_in_their_rows(name):
    install(wrapped(name))
    encoder = InPromptEncoder(wrapped(name), described(name))
    key = KVKey("model", "space", "chunk", "average:3", ("system",))
    item = Missing(key, SECOND, InPromptEncoding("average:3", (*SYSTEM, *FIRST), segments=(9, 14)))
    (plain,) = encoder.forward([item], [])
    (asked,) = encoder.forward([item], [], QUESTION)
    start, whole = len(SYSTEM + FIRST), (*SYSTEM, *FIRST, *SECOND, *QUESTION)
    expected = eager(name, whole, len(QUESTION), start, start + len(SECOND))
    assert off(asked.sums["asked"], expected) <= 1e-4
    assert "asked" not in plain.sums
    assert asked.tokens == len(SECOND)
    for ours, theirs in zip((*asked.keys, *asked.values), (*plain.keys, *plain.values), strict=True):
        assert off(ours, theirs) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_chunks_that_a_prompt_computes_have_what_its_question_attends_to(name, tmp_path):
    prompt = Prompt(
        [Text(token_ids=SYSTEM), Chunk(token_ids=FIRST), Chunk(token_ids=SECOND), Text(token_ids=QUESTION)]
    )
    with RagCache(wrapped(name), encoder="average:3", cold="now", cache_dir=tmp_path) as rag:
        rag.generate(prompt, max_new_tokens=1)
        store = rag.components.store
        (key,) = (key for key in list(store.keys()) if key.encoding == "average:3")
        found = store.get(key).kv.sums["asked"]
    start, whole = len(SYSTEM + FIRST), (*SYSTEM, *FIRST, *SECOND, *QUESTION)
    assert off(found, eager(name, whole, len(QUESTION), start, start + len(SECOND))) <= 1e-4
