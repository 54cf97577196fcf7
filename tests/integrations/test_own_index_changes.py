"""Changes of an index of one's own: what they drop, and a disk that fails meanwhile."""

from integration_kit import FACTS, WordEmbeddings
from langchain_core.documents import Document

from langchain_ragcachekit import RagCacheRetriever
from ragcachekit import JsonStore

QUESTION = "Where was Ada Lind born?"


def own(**settings):
    documents = [Document(text, id=str(row)) for row, text in enumerate(FACTS)]
    documents += [Document(f"filler {row}", id=f"f{row}") for row in range(20)]
    return RagCacheRetriever.from_documents(documents, WordEmbeddings(), index="brute", k=1, **settings)


def test_a_failing_disk_costs_no_answer_and_returns_nothing_stale(tmp_path, monkeypatch):
    put = JsonStore.put

    def refused_questions(store, values, **options):
        if store.folder.name == "questions":
            raise OSError("no space left")
        return put(store, values, **options)

    retriever = own(path=tmp_path / "index")
    (gone,) = retriever.invoke(QUESTION)
    with monkeypatch.context() as patched:
        patched.setattr(JsonStore, "put", refused_questions)
        assert retriever.vectorstore.delete([gone.id])
        assert retriever.invoke(QUESTION) != [gone]
    retriever.vectorstore.add_documents([Document("something else")])
    retriever.vectorstore.close()
    assert own_again(tmp_path).invoke(QUESTION) != [gone]


def own_again(tmp_path):
    return RagCacheRetriever.from_documents([], WordEmbeddings(), index="brute", path=tmp_path / "index", k=1)
