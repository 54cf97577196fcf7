"""Names that the code blocks of the documentation use without making them: what a reader has already."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.schema import TextNode

import langchain_ragcachekit
import llama_index_ragcachekit
import ragcachekit
from ragcachekit import DocumentIndex, RagCache

TEXTS = [
    "Berlin is the capital of Germany. The river Spree flows in Berlin.",
    "Paris is the capital of France; the river Seine flows in Paris.",
    "Rome is the capital of Italy, and the river Tiber flows in Rome.",
]
QUESTION = "Where does the river flow?"
WIDTH = 16
PLACES = ("path/or/hub-id", "Qwen/Qwen3-0.6B")
"""What stands for a model in the documentation."""


def prompt_of(question: str, texts: Iterable[str] = TEXTS) -> str:
    return "\n\n".join(["Answer from the context.", *texts, question])


def format_docs(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


@contextmanager
def names_for(page: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """The namespace of one page's blocks, over the model in ``folder``; closes every engine that it holds."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = {name: getattr(ragcachekit, name) for name in ragcachekit.__all__}
    with RagCache(model, tokenizer, policy="lego:4") as rag:
        names |= {"model": model, "tokenizer": tokenizer, "rag": rag, "np": np}
        names |= {"texts": list(TEXTS), "question": QUESTION, "prompt_of": prompt_of}
        names |= {"prompt": prompt_of(QUESTION), "prompts": [prompt_of(q) for q in (QUESTION, "Why?")]}
        names |= {"messages": [{"role": "user", "content": prompt_of(QUESTION)}]}
        names |= _of_langchain()
        if page.name == "llama_index.md":
            names |= _of_llama_index()
        names |= _of_page(page, names)
        dispatcher = get_dispatcher()
        handlers = list(dispatcher.event_handlers)
        try:
            yield names
        finally:
            dispatcher.event_handlers[:] = handlers
            for value in list(names.values()):
                if isinstance(value, RagCache):
                    value.close()


def _of_langchain() -> dict[str, Any]:
    documents = [Document(text, id=str(n), metadata={"source": "rivers.md"}) for n, text in enumerate(TEXTS)]
    embeddings = DeterministicFakeEmbedding(size=WIDTH)
    vectorstore = InMemoryVectorStore.from_documents(documents, embeddings)
    common = {
        "BaseCallbackHandler": BaseCallbackHandler,
        "BaseRetriever": BaseRetriever,
        "ChatPromptTemplate": ChatPromptTemplate,
        "ConfigurableField": ConfigurableField,
        "Document": Document,
        "RunnablePassthrough": RunnablePassthrough,
        "StrOutputParser": StrOutputParser,
        "documents": documents,
        "embeddings": embeddings,
        "format_docs": format_docs,
        "retriever": vectorstore.as_retriever(search_kwargs={"k": 2}),
        "vectorstore": vectorstore,
    }
    return {name: getattr(langchain_ragcachekit, name) for name in langchain_ragcachekit.__all__} | common


def _of_llama_index() -> dict[str, Any]:
    embed_model = MockEmbedding(embed_dim=WIDTH)
    nodes = [TextNode(text=text, id_=str(n)) for n, text in enumerate(TEXTS)]
    index = VectorStoreIndex(nodes, embed_model=embed_model)
    common = {"embed_model": embed_model, "index": index, "nodes": nodes, "TextNode": TextNode}
    common["retriever"] = index.as_retriever(similarity_top_k=2)
    return {name: getattr(llama_index_ragcachekit, name) for name in llama_index_ragcachekit.__all__} | common


def _of_page(page: Path, names: dict[str, Any]) -> dict[str, Any]:
    if page.name == "serving.md":
        index = DocumentIndex()
        vectors = np.eye(len(TEXTS), WIDTH)
        index.add([str(n) for n in range(len(TEXTS))], vectors, TEXTS)
        return {"index": index, "embedding": vectors[0]}
    if page.name == "tuning.md":
        names["rag"].register(TEXTS)
        rows = np.random.default_rng(0).normal(size=(3, 40, WIDTH))
        return {"same": (rows[0], rows[0] + 0.01 * rows[1]), "different": (rows[0], rows[2])}
    if page.name == "retrieval.md":
        store = names["RagCacheVectorStore"](names["embeddings"])
        store.add_documents(names["documents"])
        return {
            "vectorstore": store,
            "current_user": lambda: "ann",
            "database": SimpleNamespace(last_change=lambda: 1),
            "more": [Document("The river Thames flows in London.", id="id")],
            "nodes": _of_llama_index()["nodes"],
        }
    return {}
