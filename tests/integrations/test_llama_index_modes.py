"""Chunks are reused through LlamaIndex's response modes, chat engines, merging retrievers, postprocessors.

Models of the grade ``prefix`` reuse them after the same beginning, and answer as without the library.
"""

import re
from collections import Counter
from functools import partial

import pytest
from integration_kit import FACTS
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
)
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import SentenceWindowNodeParser
from llama_index.core.postprocessor import MetadataReplacementPostProcessor, SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import Document, NodeRelationship, RelatedNodeInfo, TextNode
from llama_kit import Embedder, seeing

from llama_index_ragcachekit import (
    ChunkReuseEvent,
    RagCacheLLM,
    RagCachePostprocessor,
    RagCachePromptHelper,
    RagCacheRetriever,
    RagCacheSynthesizer,
)
from soak_kit import soaked

FIRST = "Where was Ada Lind born, who is a baker?"
SECOND = "What does Ada Lind work as, who was born in Bern?"
TOKENS = 4
CHAT = {"add_generation_prompt": True, "return_dict": True}
MODES = ("compact", "refine", "tree_summarize", "accumulate", "compact_accumulate")

pytestmark = pytest.mark.parametrize("rag", soaked(["linked", "prefix"], "linked"), indirect=True)


class Words(Embedder):
    """Never zero, whatever a tiny model asks."""

    def _get_query_embedding(self, query):
        return [1.0, *super()._get_query_embedding(query)[1:]]


class LastFirst(BaseNodePostprocessor):
    """A reranker that keeps the last two, in reverse."""

    def _postprocess_nodes(self, nodes, query_bundle=None):
        return nodes[:-3:-1]


@pytest.fixture
def llm(rag):
    return RagCacheLLM(rag=rag, max_tokens=TOKENS)


@pytest.fixture
def embedder():
    return Words(asked=[])


def index_of(nodes, embedder, **settings):
    return VectorStoreIndex(nodes, embed_model=embedder, **settings)


@pytest.fixture
def retriever(rag, embedder):
    nodes = [TextNode(text=text, metadata={"file_name": f"{n}.txt"}) for n, text in enumerate(FACTS)]
    inner = index_of(nodes, embedder).as_retriever(similarity_top_k=3)
    return RagCacheRetriever(inner, embed_model=embedder, rag=rag)


def bare(rag, prompt, is_chat):
    """What the model's own generate answers to messages, or to a text, which a chat model gets as one."""
    if isinstance(prompt, str) and is_chat:
        prompt = [{"role": "user", "content": prompt}]
    encode = rag.tokenizer if isinstance(prompt, str) else partial(rag.tokenizer.apply_chat_template, **CHAT)
    ids = encode(prompt, return_tensors="pt")["input_ids"]
    out = rag.model.generate(
        input_ids=ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=TOKENS, do_sample=False
    )
    return rag.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def reused(ask, rag, is_chat=True):
    """Ask twice; check that nodes of both answers were reused in the second, and return its prompts.

    A model of the grade ``prefix`` is asked the second once more: it reuses nodes after the same beginning.
    """
    one, answers = ask(FIRST), []
    for _ in range(1 if rag.grade == "linked" else 2):
        with seeing(ChunkReuseEvent) as seen:
            two = ask(SECOND)
        answers += seen.answers
    if rag.grade == "prefix":
        assert answers == [(prompt, bare(rag, prompt, is_chat)) for prompt, _ in answers]
        assert len(seen.answers) == len(seen.prompts)
        assert not any(event.approximate_tokens for event in seen.events)
    texts = {item.node.text for item in one.source_nodes} & {item.node.text for item in two.source_nodes}
    assert texts
    sizes = Counter(rag.count_tokens(text.strip()) for text in texts)
    if rag.grade == "linked":
        assert not sizes - Counter(use["tokens"] for use in seen.chunks if use["source"] != "computed")
    least = sum(sizes.elements()) - 4 * len(texts)  # lego:4 recomputes that many
    assert sum(event.exact_tokens + event.approximate_tokens for event in seen.events) >= least
    assert sum(event.hits for event in seen.events) >= len(texts)
    assert [event.fallback for event in seen.events] == [None] * len(seen.events)
    assert all(any(text.strip() in prompt for prompt in seen.prompts) for text in texts)
    return seen.prompts


@pytest.mark.parametrize("mode", MODES)
def test_every_response_mode_reuses_chunks_after_their_metadata(mode, retriever, llm, rag):
    synthesizer = get_response_synthesizer(llm, response_mode=mode)
    engine = RetrieverQueryEngine.from_args(retriever, llm, synthesizer)
    prompts = reused(engine.query, rag)
    assert len(prompts) == (3 if mode in ("refine", "accumulate") else 1)
    assert any(f"file_name: 0.txt\n\n{FACTS[0]}" in prompt for prompt in prompts)


def chat_engine(kind, retriever, llm):
    memory = ChatMemoryBuffer.from_defaults(llm=llm)  # the default one leaves a database open
    if kind is CondenseQuestionChatEngine:
        return kind.from_defaults(RetrieverQueryEngine.from_args(retriever, llm), llm=llm, memory=memory)
    return kind.from_defaults(retriever, llm=llm, memory=memory)


@pytest.mark.parametrize(
    "kind", [ContextChatEngine, CondensePlusContextChatEngine, CondenseQuestionChatEngine]
)
def test_chat_engines_reuse_chunks_in_their_second_turn(kind, rag, embedder, llm):
    # All nodes: what the tiny model makes of the question does not decide which are found.
    inner = index_of([TextNode(text=text) for text in FACTS[:2]], embedder).as_retriever(similarity_top_k=2)
    engine = chat_engine(kind, RagCacheRetriever(inner, embed_model=embedder, rag=rag), llm)
    prompts = reused(engine.chat, rag)
    assert any(FIRST in prompt for prompt in prompts)  # the conversation goes along


def sentences(text):
    return re.findall(r"[^.]+\.\s*", text)


@pytest.fixture
def windows(rag, embedder):
    parser = SentenceWindowNodeParser.from_defaults(window_size=1, sentence_splitter=sentences)
    nodes = parser.get_nodes_from_documents([Document(text=" ".join(FACTS))])
    inner = index_of(nodes, embedder).as_retriever(similarity_top_k=2)
    return RagCacheRetriever(inner, embed_model=embedder, rag=rag)


def test_sentence_windows_are_reused_whole(windows, llm, rag):
    replace = MetadataReplacementPostProcessor("window")
    processors = [replace, RagCachePostprocessor(rag=rag)]
    assert reused(RetrieverQueryEngine.from_args(windows, llm, node_postprocessors=processors).query, rag)


@pytest.fixture
def family():
    """Two parents of two children each, with their relationships."""
    parents, children = [], []
    for n in (0, 2):
        parent = TextNode(text=f"{FACTS[n]} {FACTS[n + 1]}", id_=f"parent-{n}")
        mine = [TextNode(text=FACTS[i], id_=f"child-{i}") for i in (n, n + 1)]
        for child in mine:
            child.relationships[NodeRelationship.PARENT] = RelatedNodeInfo(node_id=parent.node_id)
        parent.relationships[NodeRelationship.CHILD] = [RelatedNodeInfo(node_id=c.node_id) for c in mine]
        parents.append(parent)
        children += mine
    return parents, children


@pytest.mark.parametrize("ours", ["outside", "inside"])
def test_merged_parents_are_reused(ours, family, rag, embedder, llm):
    parents, children = family
    storage = StorageContext.from_defaults()
    storage.docstore.add_documents([*parents, *children])
    inner = index_of(children, embedder, storage_context=storage).as_retriever(similarity_top_k=4)
    if ours == "outside":
        retriever = RagCacheRetriever(AutoMergingRetriever(inner, storage), embed_model=embedder, rag=rag)
        engine = RetrieverQueryEngine.from_args(retriever, llm)
    else:
        cached = RagCacheRetriever(inner, embed_model=embedder, rag=rag)
        retriever = AutoMergingRetriever(cached, storage)
        registering = RagCachePostprocessor(rag=rag)
        engine = RetrieverQueryEngine.from_args(retriever, llm, node_postprocessors=[registering])
    reused(engine.query, rag)
    assert {item.node.node_id for item in engine.query(FIRST).source_nodes} == {"parent-0", "parent-2"}


def whole_nodes(mode):
    def synthesizer(llm):
        return get_response_synthesizer(llm, RagCachePromptHelper.from_llm(llm), response_mode=mode)

    return synthesizer


@pytest.mark.parametrize(
    ("is_chat", "settings"),
    [
        pytest.param(False, {}, id="text completion"),
        pytest.param(
            True, {"node_postprocessors": [SimilarityPostprocessor(similarity_cutoff=0.2)]}, id="cut"
        ),
        pytest.param(True, {"node_postprocessors": [LastFirst()]}, id="rerank"),
        pytest.param(True, {"response_synthesizer": whole_nodes("compact")}, id="helper, compact"),
        pytest.param(True, {"response_synthesizer": whole_nodes("tree_summarize")}, id="helper, tree"),
    ],
)
def test_other_engines_reuse_chunks_too(is_chat, settings, retriever, rag):
    llm = RagCacheLLM(rag=rag, max_tokens=TOKENS, is_chat_model=is_chat)
    made = {name: one(llm) if callable(one) else one for name, one in settings.items()}
    assert reused(RetrieverQueryEngine.from_args(retriever, llm, **made).query, rag, is_chat)


async def test_the_synthesizer_answers_alike_async_and_streaming(retriever, llm):
    def engine(**settings):
        return RetrieverQueryEngine.from_args(retriever, llm, RagCacheSynthesizer(llm, **settings))

    engine().query(SECOND)
    answer = engine().query(SECOND).response
    assert (await engine().aquery(SECOND)).response == answer
    assert "".join(engine(streaming=True).query(SECOND).response_gen) == answer
    stream = await engine(streaming=True).aquery(SECOND)
    assert "".join([piece async for piece in stream.response_gen]) == answer
