"""Changes of an index of one's own: what they drop, and a disk that fails meanwhile."""

from integration_kit import FACTS, WordEmbeddings
from langchain_core.documents import Document

from langchain_ragcachekit import RagCacheRetriever
from ragcachekit import EmbeddingCache
from ragcachekit.json_store import JsonStore

QUESTION = "Where was Ada Lind born?"


def own(**settings):
    documents = [Document(text, id=str(row)) for row, text in enumerate(FACTS)]
    documents += [Document(f"filler {row}", id=f"f{row}") for row in range(20)]
    return RagCacheRetriever.from_documents(documents, WordEmbeddings(), index="brute", k=1, **settings)


def test_a_deletion_drops_no_result_without_the_document():
    retriever = own()
    retriever.invoke(QUESTION)
    (held,) = retriever._retrieval._entries.held.values()
    used = {one.record.id for _, one in held.found}
    other = next(one for one in retriever.vectorstore.index.ids if one not in used)
    retriever.vectorstore.delete([other])
    assert retriever._retrieval.stats().entries == 1
    retriever.vectorstore.delete([next(iter(used))])
    assert retriever._retrieval.stats().entries == 0


def test_a_failing_disk_costs_no_answer_and_returns_nothing_stale(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError("no space left")

    retriever = own(path=tmp_path / "index")
    (gone,) = retriever.invoke(QUESTION)
    with monkeypatch.context() as patched:
        patched.setattr(retriever._retrieval._store, "put", refused)
        assert retriever.vectorstore.delete([gone.id])
        assert retriever.invoke(QUESTION) != [gone]
    retriever.vectorstore.add_documents([Document("something else")])
    retriever.vectorstore.close()
    assert own_again(tmp_path).invoke(QUESTION) != [gone]


def own_again(tmp_path):
    return RagCacheRetriever.from_documents([], WordEmbeddings(), index="brute", path=tmp_path / "index", k=1)


def test_few_embeddings_are_few_on_disk(tmp_path):
    store = JsonStore(tmp_path)
    cache = EmbeddingCache("model", 10, store)
    for number in range(50):
        cache.embed(str(number), lambda _: [1.0, 2.0])
    assert len(store) <= 11
