"""RagCacheRetriever.from_documents and from_nodes: order, restart, repeated embeddings, recall of results."""

import numpy as np
import pytest
from fake_engine import FakeEngine
from integration_kit import FACTS, WordEmbeddings, deleted_elsewhere
from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.documents import Document
from llama_index.core.schema import TextNode
from llama_kit import Embedder

from langchain_ragcachekit import RagCacheRetriever, RagCacheVectorStore
from llama_index_ragcachekit import RagCacheRetriever as LlamaRetriever

QUESTION = "Where was Ada Lind born?"


def test_another_process_is_seen_by_the_next_question(tmp_path):
    path = tmp_path / "index"
    retriever = RagCacheRetriever.from_documents(
        [Document(text) for text in FACTS], WordEmbeddings(), path=path, k=1
    )
    (gone,) = retriever.invoke(QUESTION)
    assert retriever.invoke(QUESTION) == [gone]
    deleted_elsewhere(path, gone.id)
    assert retriever.invoke(QUESTION)[0] != gone


def test_a_near_question_gets_its_own_order_and_scores():
    """Recall of results over an index: near questions hit, and are answered as a search would."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((20, 32))
    table = {f"text {n}": row.tolist() for n, row in enumerate(rng.standard_normal((400, 32)))}
    asked = {
        f"q{n} {i}": (row + 0.05 * rng.standard_normal(32)).tolist()
        for n, row in enumerate(base)
        for i in range(4)
    }

    class Table(Embedder):
        def _get_query_embedding(self, query):
            return asked[query]

        def _get_text_embedding(self, text):
            return table[text]

    nodes = [TextNode(text=text, id_=text) for text in table]
    retriever = LlamaRetriever.from_nodes(nodes, Table(asked=[]), k=5, tolerance=0.1, guard=False)
    plain = retriever.index.as_retriever(similarity_top_k=5)
    recall = []
    for question in asked:
        mine, right = retriever.retrieve(question), plain.retrieve(question)
        recall.append(len({one.node_id for one in mine} & {one.node_id for one in right}) / 5)
        scores = {one.node_id: one.score for one in right}
        for one in mine:
            assert one.score == pytest.approx(scores.get(one.node_id, one.score), abs=1e-5)
    assert retriever.query_cache.stats().hits >= 55
    assert np.mean(recall) > 0.98


def test_invalidate_by_id_text_and_filter_or_everything():
    documents = [Document(text, id=str(n), metadata={"row": n}) for n, text in enumerate(FACTS)]
    retriever = RagCacheRetriever.from_documents(documents, WordEmbeddings(), k=1)
    held = retriever.query_cache.stats
    (found,) = retriever.invoke(QUESTION)
    row = found.metadata["row"]
    assert retriever.query_cache.invalidate(ids=["unknown"], texts=["unknown"], where=lambda one: False) == 0
    assert retriever.query_cache.invalidate(ids=[]) == 0
    for named in (
        {"ids": [str(row)]},
        {"texts": [f" {found.page_content}\n"]},
        {"where": lambda one: one.metadata["row"] == row},
        {},
    ):
        assert held().entries == 1
        assert retriever.query_cache.invalidate(**named) == 1
        assert held().entries == 0
        retriever.invoke(QUESTION)


@pytest.mark.parametrize("partition", [None, lambda *_: "all"])
def test_other_kinds_of_search_see_the_changes_of_other_processes(tmp_path, partition):
    store = RagCacheVectorStore(WordEmbeddings(), path=tmp_path)
    store.add_documents([Document(text) for text in FACTS])
    inner = store.as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"k": 1, "score_threshold": 0.01}
    )
    retriever = RagCacheRetriever.wrap(inner, embeddings=store.embeddings, partition=partition)
    (gone,) = retriever.invoke(QUESTION)
    assert retriever.invoke(QUESTION) == [gone]
    assert retriever.query_cache.stats().hits == 1
    deleted_elsewhere(tmp_path, gone.id)
    assert retriever.invoke(QUESTION) != [gone]


def test_a_node_with_another_text_replaces_the_one_of_its_id(tmp_path):
    model = Embedder(asked=[])
    for text in ("Ada Lind was born in Bern.", "Ada Lind was born in Chur."):
        retriever = LlamaRetriever.from_nodes([TextNode(text=text, id_="a")], model, path=tmp_path)
        assert [one.node.text for one in retriever.retrieve(QUESTION)] == [text]
        retriever.index.vector_store.close()


async def test_the_event_says_why_a_near_question_was_refused():
    events = []

    class Handler(AsyncCallbackHandler):
        async def on_custom_event(self, name, data, **kwargs):
            events.append((name, data))

    retriever = RagCacheRetriever.from_documents(
        [Document(text) for text in FACTS],
        WordEmbeddings(),
        index="faiss-flat",
        tolerance=0.9,
        rag=FakeEngine(),
    )
    for question in (QUESTION, "Where was Ada Lind not born?"):
        await retriever.ainvoke(question, {"callbacks": [Handler()]})
    assert [name for name, _ in events] == ["ragcachekit_query_miss"] * 2
    assert [data.get("refused") for _, data in events] == [None, "negation"]
