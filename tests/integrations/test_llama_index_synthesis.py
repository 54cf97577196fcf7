"""Whole nodes in prompts: how RagCachePromptHelper packs them, where LlamaIndex's own helper cuts."""

import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_kit import seeing
from pydantic import BaseModel

from llama_index_ragcachekit import (
    ChunkReuseEvent,
    RagCacheLLM,
    RagCachePostprocessor,
    RagCachePromptHelper,
    RagCacheSynthesizer,
)
from ragcachekit import RagCache
from speaking import byte_level, speaker

TEXTS = [" ".join(f"n{node}w{word}" for word in range(90)) for node in range(6)]


class Fixed(BaseRetriever):
    def _retrieve(self, query_bundle):
        return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in TEXTS]


@pytest.fixture
def engine():
    return FakeEngine()


def make_llm(engine, window=500):
    return RagCacheLLM(rag=engine, max_tokens=10, context_window=window)


def prompts_of(synthesizer, llm):
    with seeing(ChunkReuseEvent) as seen:
        RetrieverQueryEngine.from_args(Fixed(), llm, synthesizer).query("What is it?")
    return seen.prompts


def test_the_synthesizer_cuts_no_node_where_several_prompts_are_needed(engine):
    llm = make_llm(engine)
    prompts = prompts_of(RagCacheSynthesizer(llm), llm)
    assert 1 < len(prompts) < len(TEXTS)
    assert [sum(text in prompt for prompt in prompts) for text in TEXTS] == [1] * len(TEXTS)
    assert all(engine.count_tokens(prompt) <= 500 - 10 for prompt in prompts)


def test_a_node_that_is_cut_is_noted(tmp_path):
    texts = [f"Room {n} of the house holds {n} chairs. " * 12 + f"It has {n} doors." for n in range(7)]
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts]
    model = speaker(max_position_embeddings=4096)
    with RagCache(model, byte_level(), policy="reuse", cache_dir=tmp_path) as rag:
        rag.register(texts)
        llm = RagCacheLLM(rag=rag, max_tokens=2, context_window=1900)
        count = rag.count_tokens
        own = PromptHelper(context_window=1900, num_output=2, tokenizer=lambda text: list(range(count(text))))
        for synthesizer in (get_response_synthesizer(llm, own), RagCacheSynthesizer(llm)):
            with seeing(ChunkReuseEvent) as seen:
                synthesizer.synthesize("What is it?", nodes)
            cut = [text for text in texts if not any(text in prompt for prompt in seen.prompts)]
            notes = [note for event in seen.events for note in event.notes]
            assert len(seen.prompts) > 1
            assert bool(cut) == bool(notes) == (type(synthesizer) is not RagCacheSynthesizer)


def test_a_node_longer_than_a_prompt_is_cut_and_none_of_it_lost(engine):
    llm = make_llm(engine, window=250)
    helper = RagCachePromptHelper.from_llm(llm, chunk_overlap_ratio=0.0)
    packs = helper.repack(PromptTemplate("Answer: {context_str}"), ["short", TEXTS[0] + " " + TEXTS[1]])
    assert packs[0] == "short"
    assert len(packs) == 3
    assert " ".join(packs[1:]).split() == (TEXTS[0] + " " + TEXTS[1]).split()
    assert all(engine.count_tokens(pack) <= 250 - 64 for pack in packs)


WORDS = st.lists(st.sampled_from(["a", "bb", "ccc\n", "d\n\ne"]), min_size=1, max_size=40).map(" ".join)


@given(texts=st.lists(st.one_of(WORDS, st.just(" \n")), max_size=12))
def test_packs_are_the_texts_unaltered_in_order_and_as_full_as_fits(texts):
    helper = RagCachePromptHelper(context_window=120, num_output=10, tokenizer=str.split)
    packs = helper.repack(PromptTemplate("{context_str}"), texts, padding=0)
    kept = [text for text in texts if text.strip()]
    assert "\n\n".join(packs) == "\n\n".join(kept)
    sizes = [0]
    for size in (len(text.split()) for text in kept):
        if sizes[-1] + size <= 120 - 10:
            sizes[-1] += size
        else:
            sizes.append(size)
    assert [len(pack.split()) for pack in packs] == sizes


class Town(BaseModel):
    """A town."""

    name: str


@pytest.mark.parametrize("way", ["output_cls", "structured model"])
def test_answers_of_a_schema(way):
    llm = make_llm(FakeEngine(words=('{"name":', '"Oslo"}')), window=2000)
    if way == "output_cls":
        synthesizer = RagCacheSynthesizer(llm, output_cls=Town)
    else:
        synthesizer = RagCacheSynthesizer(llm.as_structured_llm(Town))
    assert RetrieverQueryEngine(Fixed(), synthesizer).query("Where?").response == Town(name="Oslo")


def test_another_model_is_refused():
    with pytest.raises(TypeError, match=r"needs llm=RagCacheLLM\(\.\.\.\), got MockLLM"):
        RagCacheSynthesizer(MockLLM())


def test_what_is_no_engine_is_refused():
    with pytest.raises(ValueError, match=r"RagCachePostprocessor needs rag=RagCache\(\.\.\.\), got 3"):
        RagCachePostprocessor(rag=3)


async def test_the_postprocessor_registers_bare_texts_in_its_namespace(engine):
    nodes = [
        NodeWithScore(node=TextNode(text="a text of some length", metadata={"page": 3})),
        NodeWithScore(node=TextNode(text=" ")),
    ]
    registering = RagCachePostprocessor(rag=engine, namespace="acme")
    assert registering.postprocess_nodes(nodes) is nodes
    assert await registering.apostprocess_nodes(nodes) is nodes
    assert engine.registered == [("acme", ["a text of some length"])] * 2
    assert registering.to_dict()["namespace"] == "acme"
