"""The order of chunks that retrievers give to the engine, from the metadata of both frameworks."""

from fake_engine import FakeEngine
from integration_kit import FACTS, WordEmbeddings
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from llama_index.core import Document as LlamaDocument
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

from langchain_ragcachekit import RagCacheRetriever
from langchain_ragcachekit import search as langchain
from llama_index_ragcachekit import search as llama_index
from ragcachekit.retrieval.chunk_order import note_order

TEXT = "\n\n".join(f"{fact} That is fact {number}." for number, fact in enumerate(FACTS * 3))


def noted(framework, chunks):
    engine = FakeEngine()
    note_order(engine, "space", map(framework.place_of, chunks))
    assert all(namespace == "space" for namespace, *_ in engine.orders)
    return {document: (texts, starts) for _, document, texts, starts in engine.orders}


def in_order(orders, document):
    texts, starts = orders[document]
    return [text for _, text in sorted(zip(starts, texts, strict=True))]


def test_chunks_of_a_splitter_by_their_start_index():
    splitter = RecursiveCharacterTextSplitter(chunk_size=120, chunk_overlap=0, add_start_index=True)
    pages = [Document(TEXT, metadata={"source": "a.md"}), Document(TEXT[::-1], metadata={"source": "b.md"})]
    chunks = splitter.split_documents(pages)
    first = [chunk.page_content for chunk in chunks if chunk.metadata["source"] == "a.md"]
    assert len(first) > 5
    orders = noted(langchain, chunks[::-1])
    assert set(orders) == {"a.md", "b.md"}
    assert in_order(orders, "a.md") == first


def test_pages_follow_each_other_and_chunks_without_a_place_come_by_arrival():
    two = [
        Document("c", metadata={"source": "p", "page": 1, "start_index": 0}),
        Document("b", metadata={"source": "p", "page": 0, "start_index": 90}),
        Document("a", metadata={"source": "p", "page": 0, "start_index": 0}),
        Document("x", metadata={"doc_id": 7, "start_index": -1}),
        Document("y", metadata={"doc_id": 7, "start_index": 3}),
        Document("nobody's", metadata={"start_index": 3}),
    ]
    orders = noted(langchain, two)
    assert in_order(orders, "p") == ["a", "b", "c"]
    assert orders["7"] == (["x", "y"], None)
    assert len(orders) == 2


def test_a_store_in_memory_shows_its_documents():
    store = InMemoryVectorStore(WordEmbeddings())
    store.add_texts(list(FACTS), [{"source": "f", "start_index": n} for n in range(len(FACTS))])
    engine = FakeEngine()
    retriever = RagCacheRetriever.wrap(store, cache=engine)
    assert in_order({document: rest for _, document, *rest in engine.orders}, "f") == list(FACTS)
    store.delete([next(iter(store.store))])
    store.add_texts(["A new fact."], [{"source": "f", "start_index": 9}])
    retriever.invoke("Is there something new?")
    assert engine.dropped == [("default", [FACTS[0]])]
    assert engine.orders[1:] == [("default", "f", ["A new fact."], [9])]


def test_nodes_of_a_parser_by_their_place():
    nodes = SentenceSplitter(chunk_size=40, chunk_overlap=0)([LlamaDocument(text=TEXT, id_="doc")])
    assert len(nodes) > 5
    orders = noted(llama_index, nodes[::-1])
    assert in_order(orders, "doc") == [node.text for node in nodes]


def test_nodes_without_a_place_come_by_arrival():
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="doc")}
    nodes = [TextNode(text=f"text {number}", relationships=source) for number in range(2)]
    assert noted(llama_index, nodes)["doc"] == (["text 0", "text 1"], None)
    assert noted(llama_index, [TextNode(text="nobody's")]) == {}
