"""What a reviewer and a newcomer found: replaced chunks, other ways to search, filters, threads, restarts."""

import subprocess
import sys

import pytest
from fake_engine import FakeEngine
from integration_kit import FACTS, WordEmbeddings
from langchain_core.documents import Document
from llama_index.core.schema import TextNode
from llama_kit import Embedder

from langchain_ragcachekit import RagCacheRetriever, RagCacheVectorStore
from llama_index_ragcachekit import RagCacheRetriever as LlamaRetriever

QUESTION = "Where was Ada Lind born?"
DELETE = """
import sys
from ragcachekit import DocumentIndex

DocumentIndex("brute", path=sys.argv[1]).delete([sys.argv[2]])
"""


def stored(texts=FACTS):
    return [
        Document(text, id=str(n), metadata={"source": "f", "start_index": n}) for n, text in enumerate(texts)
    ]


@pytest.mark.parametrize("partition", [None, lambda *_: "all"])
def test_other_kinds_of_search_see_the_changes_of_other_processes(tmp_path, partition):
    store = RagCacheVectorStore(WordEmbeddings(), index="brute", path=tmp_path)
    store.add_documents(stored())
    inner = store.as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"k": 1, "score_threshold": 0.01}
    )
    retriever = RagCacheRetriever.wrap(inner, embeddings=store.embeddings, partition=partition)
    (gone,) = retriever.invoke(QUESTION)
    assert retriever.invoke(QUESTION) == [gone]
    assert retriever.query_cache.stats().hits == 1
    subprocess.run([sys.executable, "-c", DELETE, str(tmp_path), gone.id], check=True)
    assert retriever.invoke(QUESTION) != [gone]


def test_a_node_with_another_text_replaces_the_one_of_its_id(tmp_path):
    model = Embedder(asked=[])
    for text in ("Ada Lind was born in Bern.", "Ada Lind was born in Chur."):
        retriever = LlamaRetriever.from_nodes(
            [TextNode(text=text, id_="a")], model, index="brute", path=tmp_path
        )
        assert [one.node.text for one in retriever.retrieve(QUESTION)] == [text]
        retriever.index.vector_store.close()


async def test_the_event_says_why_a_near_question_was_refused():
    events = []

    class Seen(FakeEngine):
        pass

    from langchain_core.callbacks import AsyncCallbackHandler

    class Handler(AsyncCallbackHandler):
        async def on_custom_event(self, name, data, **kwargs):
            events.append((name, data))

    retriever = RagCacheRetriever.from_documents(
        stored(), WordEmbeddings(), index="brute", tolerance=0.9, cache=Seen()
    )
    for question in (QUESTION, "Where was Ada Lind not born?"):
        await retriever.ainvoke(question, {"callbacks": [Handler()]})
    assert [name for name, _ in events] == ["ragcachekit_query_miss"] * 2
    assert [data.get("refused") for _, data in events] == [None, "negation"]
