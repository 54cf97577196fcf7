"""A whole LangChain program with RagCacheKit: `python examples/langchain_app.py [folder of a model]`.

Put your own texts into DOCUMENTS and your own questions into QUESTIONS. Without a model it runs the small one
that comes with the package, which reads sentences of its own little world only, such as these. Two lines
differ from a chain without RagCacheKit; they are marked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_ragcachekit import ChatRagCache, RagCacheRetriever
from ragcachekit import PrecedingChunks, RagCache
from ragcachekit.commands.embedding import MiniLM

DOCUMENTS = {
    "Simon Quigley": """\
Simon Quigley was born in Pebblebeach and was trained as a farmer. Everyone knows that Simon Quigley
works for Novaline, and it is known that Simon Quigley speaks German.

This person also likes to eat pasta and collects stones. People say that this person keeps a frog, and
friends say that this person plays the harmonica.""",
    "Leo Rankin": """\
People say that Leo Rankin was trained as a baker, and neighbors say that Leo Rankin was born in
Pebblebeach. Leo Rankin works for Elmstone and speaks Arabic.

We hear that this person also collects records, and people say that this person keeps a turtle. This
person likes to eat noodles and plays the harmonica.""",
}
QUESTIONS = ("Where was Simon Quigley born?", "Which animal does Leo Rankin keep?", "Who employs Leo Rankin?")
READER = Path(__file__).resolve().parents[1] / "benchmarks" / "world" / "reader"


def main(arguments: Sequence[str] = ()) -> None:
    """Answer the questions, and say what each one reused."""
    model = arguments[0] if arguments else str(READER)
    chunks = {
        title: [" ".join(part.split()) for part in text.split("\n\n")] for title, text in DOCUMENTS.items()
    }
    documents = [Document(text, metadata={"title": title}) for title in chunks for text in chunks[title]]
    embeddings = MiniLM()  # any LangChain embeddings
    vectorstore = InMemoryVectorStore.from_documents(documents, embeddings)
    retriever = vectorstore.as_retriever(search_kwargs={"k": 4})
    prompt = ChatPromptTemplate(
        [("system", "Answer the question from the context.\n\n{context}"), ("human", "{question}")]
    )
    with RagCache.from_pretrained(
        model,
        policy="lego:2",
        encoder="similar:1",  # behind the chunk before it: "this person" stays bound to a name
        encode_after=1,  # three questions only; by default a chunk is encoded after its second use
        neighbours=PrecedingChunks(chunks.values()),
    ) as rag:
        retriever = RagCacheRetriever.wrap(retriever, embeddings=embeddings, cache=rag)  # <- line 1
        chat = ChatRagCache(cache=rag, max_tokens=32)  # <- line 2
        chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | chat
        for question in QUESTIONS:
            message = chain.invoke(question)  # `| StrOutputParser()` would give the text alone
            link = message.response_metadata["ragcachekit"]["link"]
            reused = link["exact_tokens"] + link["approximate_tokens"]
            print(f"{question} {message.content}")
            print(
                f"  {link['prompt_tokens']} tokens: {reused} reused, "
                f"{link['recomputed_tokens']} recomputed, {link['computed_tokens']} computed"
            )
            for line in filter(None, (link["fallback"], *link["notes"])):  # why, if less than expected
                print(f"  {line}")
            rag.flush()  # what the question missed is encoded behind its answer; only a demonstration waits


def format_docs(documents: Sequence[Document]) -> str:
    """The chunks as they are: text that is changed here is not recognised as a chunk."""
    return "\n\n".join(document.page_content for document in documents)


if __name__ == "__main__":
    main(sys.argv[1:])
