"""The encoder ``similar:n`` takes neighbours from the stores of retrievers, without ``neighbours=``."""

from functools import partial

import pytest
from integration_kit import FACTS, WordEmbeddings
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.runnables import ConfigurableField
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import VectorStoreIndex
from llama_index.core.retrievers import VectorIndexRetriever
from llama_index.core.schema import TextNode
from llama_kit import Embedder

from langchain_ragcachekit import RagCacheRetriever
from llama_index_ragcachekit import RagCacheRetriever as LlamaRetriever
from ragcachekit import PrecedingChunks, RagCache, SimilarChunks

SYSTEM = "Answer from the context only.\n\n"
NEW = "Carl Weiss was born in Kiel. He works for Norda and paints the names on all of the boats."
COSINE = partial(Chroma, collection_configuration={"hnsw": {"space": "cosine"}})
LANGCHAIN = {
    "memory": lambda rag, path: InMemoryVectorStore(WordEmbeddings()).as_retriever(),
    "chroma": lambda rag, path: COSINE(path.name, WordEmbeddings()).as_retriever(),
    "own": lambda rag, path: RagCacheRetriever.from_documents([], WordEmbeddings(), path=path).retriever,
}


@pytest.fixture
def engine(tiny_model, tiny_tokenizer, digests):
    opened = []

    def engine(encoder="similar:2", **options):
        given = {"policy": "reuse", "encoder": encoder, "cold": "never", "cache_dir": digests, **options}
        opened.append(RagCache(tiny_model, tiny_tokenizer, **given))
        return opened[-1]

    yield engine
    for one in opened:
        one.close()


def encoded(rag, texts):
    """The keys of what these chunks are encoded as: they name what each is after."""
    rag.forget()
    rag.encode(texts, system=SYSTEM)
    return set(rag.components.store.keys())


def expected(engine, texts, encode=None):
    near = SimilarChunks(texts, WordEmbeddings().embed_documents)
    return encoded(engine(neighbours=near), encode or texts)


@pytest.mark.parametrize("kind", LANGCHAIN)
def test_they_are_the_nearest_in_the_store_and_follow_it(engine, kind, tmp_path):
    rag = engine()
    inner = LANGCHAIN[kind](rag, tmp_path)
    store, retriever = inner.vectorstore, RagCacheRetriever.wrap(inner, rag=rag, k=1)
    store.add_documents([Document(text, id=str(n), metadata={"n": n}) for n, text in enumerate(FACTS)])
    assert encoded(rag, FACTS[4:5]) == expected(engine, FACTS, FACTS[4:5])
    store.add_documents([Document(NEW, id="new", metadata={"n": 9})])
    assert encoded(rag, FACTS[4:5]) == expected(engine, [*FACTS, NEW], FACTS[4:5])
    store.delete(["new"])
    assert encoded(rag, FACTS[4:5]) == expected(engine, FACTS, FACTS[4:5])
    assert retriever.invoke("Norda?"), "it still searches"


def test_of_llama_index_and_not_of_another_retrievers_namespace(engine):
    rag, model = engine(), Embedder(asked=[])
    index = VectorStoreIndex([TextNode(text=text, id_=text) for text in FACTS], embed_model=model)
    kept = LlamaRetriever(VectorIndexRetriever(index), embed_model=model, rag=rag)
    assert encoded(rag, FACTS[4:5]) == expected(engine, FACTS, FACTS[4:5])
    index.insert_nodes([TextNode(text=NEW, id_="new")])
    assert encoded(rag, FACTS[4:5]) == expected(engine, [*FACTS, NEW], FACTS[4:5])
    rag.encode(FACTS[4:5], namespace="other", system=SYSTEM)
    keys = set(rag.components.store.keys())
    assert {len(key.context) for key in keys if key.namespace == "other"} == {1}, "the system text only"
    assert kept.query_cache.stats().entries == 0


def test_what_is_passed_wins_and_other_encoders_do_not_search(engine):
    given = engine(neighbours=PrecedingChunks([FACTS]))
    average = engine("average:2")
    plain = encoded(average, FACTS)
    for rag in (given, average):
        store = InMemoryVectorStore(WordEmbeddings())
        store.add_documents([Document(text) for text in FACTS])
        retriever = RagCacheRetriever.wrap(store, rag=rag)
        retriever.invoke("Norda?")
    assert encoded(given, FACTS) == encoded(engine(neighbours=PrecedingChunks([FACTS])), FACTS)
    assert encoded(average, FACTS) == plain


@pytest.mark.parametrize("how", ["configurable", "an argument", "the retriever's own"])
def test_a_filter_holds_for_neighbours(engine, how):
    """What one user may read is not part of what another user's chunks are encoded after."""
    rag, ann = engine(), {"filter": {"user": "ann"}}
    store = COSINE(f"filtered-{len(how)}", WordEmbeddings())
    store.add_documents(
        [Document(text, metadata={"user": "ann" if n < 3 else "bob"}) for n, text in enumerate(FACTS)]
    )
    inner, config = store.as_retriever(search_kwargs=ann if how == "the retriever's own" else {}), None
    if how == "configurable":
        inner = inner.configurable_fields(search_kwargs=ConfigurableField(id="search"))
        config = {"configurable": {"search": ann}}
    retriever = RagCacheRetriever.wrap(inner, rag=rag)
    retriever.invoke("Where was Ada Lind born?", config, **(ann if how == "an argument" else {}))
    bobs = set(engine(neighbours=SimilarChunks([], [])).encode(FACTS[3:], system=SYSTEM))
    rag.encode(FACTS[:3], system=SYSTEM)
    rag.encode(FACTS[:1], system=SYSTEM)
    keys = set(rag.components.store.keys())
    assert not any(bobs & set(key.context) for key in keys)
    assert any(len(key.context) == 3 for key in keys), "but after other chunks of ann"
