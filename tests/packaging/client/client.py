"""A project that uses the library as its documentation says, for type checkers."""

from collections.abc import Sequence
from dataclasses import dataclass

from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from langchain_ragcachekit import ChatRagCache, RagCacheRetriever
from ragcachekit import Answer, Chunk, Prompt, QueueConfig, RagCache, StoreConfig, Text, agenerate
from ragcachekit.policies.base import PlacedChunk


@dataclass(frozen=True)
class First:
    """Recomputes the first token of each chunk."""

    encoder: str | None = None
    reads_cache: bool = True

    @property
    def name(self) -> str:
        """For reports."""
        return "first"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Positions."""
        return [chunk.start for chunk in chunks if not chunk.is_exact]


def engine(model: str) -> RagCache:
    """An engine with a disk tier."""
    store = StoreConfig(host_bytes=1 << 30, disk_path="kv")
    return RagCache.from_pretrained(model, policy=First(), store=store, queue=QueueConfig(max_batch=8))


def ask(rag: RagCache, documents: list[str], question: str) -> tuple[str, int, float]:
    """Text, reused tokens, milliseconds."""
    prompt = Prompt([Text("Answer.\n"), *(Chunk(text) for text in documents), Text(question)])
    answer: Answer = rag.generate(prompt, max_new_tokens=8)
    return answer.text, answer.report.link.reused_tokens, answer.report.ttft_ms


async def ask_later(rag: RagCache, question: str) -> str:
    """Through the queue."""
    return (await agenerate(rag, question, deadline=5.0)).text


def chat(rag: RagCache, store: VectorStore, embeddings: Embeddings) -> tuple[RagCacheRetriever, ChatRagCache]:
    """The two parts of a LangChain chain."""
    retriever = RagCacheRetriever.wrap(store, embeddings=embeddings, rag=rag, tolerance=0.05)
    return retriever, ChatRagCache(rag=rag, max_tokens=16)
