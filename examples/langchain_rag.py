"""A LangChain chain that reuses its documents: `python examples/langchain_rag.py [--model PATH]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_ragcachekit import ChatRagCache, RagCacheRetriever
from ragcachekit import RagCache
from ragcachekit.commands.embedding import MiniLM

DOCUMENTS = (
    "The ferry to Norda leaves at eight in the morning, on Sundays at ten. The crossing takes fifty minutes.",
    "Tickets for the ferry to Norda cost four crowns. The harbour office sells them until it departs.",
)
QUESTIONS = ("When does the ferry leave on Sundays?", "What does a ticket for the ferry cost?")


def format_docs(documents: Sequence[Document]) -> str:
    """The texts as they are: text that is changed here is not recognised as a chunk."""
    return "\n\n".join(document.page_content for document in documents)


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer the questions, and say what each one reused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sample", help="folder or hub id")
    model = parser.parse_args(arguments).model
    embeddings = MiniLM()  # any LangChain embeddings
    store = InMemoryVectorStore.from_documents([Document(text) for text in DOCUMENTS], embeddings)
    prompt = ChatPromptTemplate(
        [("system", "Answer the question from the context.\n\n{context}"), ("human", "{question}")]
    )
    with RagCache.from_pretrained(model) as rag:
        retriever = RagCacheRetriever.wrap(store.as_retriever(search_kwargs={"k": 2}), rag=rag)  # <- line 1
        chat = ChatRagCache(rag=rag, max_tokens=24)  # <- line 2
        chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | chat
        for question in QUESTIONS:
            message = chain.invoke(question)  # `| StrOutputParser()` would give the text alone
            report = message.response_metadata["ragcachekit"]
            reused = message.usage_metadata["input_token_details"]["cache_read"]
            print(f"{question} {message.content}")
            print(f"  {reused} of {message.usage_metadata['input_tokens']} prompt tokens reused")
            for line in filter(None, (report["link"]["fallback"], *report["link"]["notes"])):
                print(f"  {line}")  # why, if less than expected


if __name__ == "__main__":
    main()
