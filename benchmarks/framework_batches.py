"""``python -m benchmarks framework-batches``: questions at once through LangChain and LlamaIndex."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core import PromptTemplate
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from tqdm.auto import tqdm

from benchmarks.datasets import Sampling, draw_questions
from langchain_ragcachekit import ChatRagCache
from llama_index_ragcachekit import RagCacheLLM
from ragcachekit import RagCache
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, show, written
from ragcachekit.commands.report import BenchReport
from ragcachekit.errors import RagCacheError
from ragcachekit.types import DEFAULT_POLICY

TEMPLATE = "Answer the question from the context.\n\n{context}\n\nQuestion: {question}\nAnswer:"
NODE_TEMPLATE = TEMPLATE.replace("{context}", "{context_str}").replace("{question}", "{query_str}")

Answers = list[str]
Ways = dict[str, Callable[[], Answers]]


def framework_batches(
    dataset: Annotated[str, typer.Option(help="squad:FILE, ...: its questions are asked.")],
    model: str = "sample",
    policy: opt.Policy = DEFAULT_POLICY,
    questions: Annotated[int, typer.Option(min=1)] = 8,
    max_new_tokens: opt.MaxNewTokens = 24,
    runs: Annotated[int, typer.Option(min=1)] = 3,
    json: opt.Json = None,
) -> None:
    """Questions at once through LangChain and LlamaIndex, against one after the other, on one engine.

    Every prompt holds three documents, all cached. The ways take turns and must answer alike. ``generate`` is
    ``rag.generate``: it shows what an ``invoke`` costs beside it.
    """
    quiet_loading()
    drawn = draw_questions(dataset, Sampling(questions, distractors=2))
    chunks = {one.question: one.chunks for one in drawn}
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="ragcachekit-bench-") as folder,
        RagCache.from_pretrained(model, dtype="float32", policy=policy, cold="now", cache_dir=folder) as rag,
        tqdm(total=2 * runs, unit="round") as bar,
    ):
        rag.model.generation_config.eos_token_id = None  # all answers have the same length
        rag.encode([text for texts in chunks.values() for text in texts])
        for framework, asked in ways(rag, chunks, max_new_tokens).items():
            bar.set_description(framework)
            rows += [{"framework": framework, **row} for row in measure(asked, runs, bar)]
    report = BenchReport("framework-batches", f"{model}, {policy}", 0, tuple(rows))
    show(report.table(f"{questions} questions of {max_new_tokens} tokens each: {report.model}"))
    written(report, json)


class Given(BaseRetriever):
    """Gives every question its documents."""

    def __init__(self, chunks: Mapping[str, Sequence[str]]) -> None:
        self._chunks = chunks
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        texts = self._chunks[query_bundle.query_str]
        return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in texts]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._retrieve(query_bundle)


def ways(rag: RagCache, chunks: Mapping[str, Sequence[str]], max_tokens: int) -> dict[str, Ways]:
    """Ways to ask all questions, by framework; the first of each is one after the other."""
    inputs = [{"context": "\n\n".join(texts), "question": question} for question, texts in chunks.items()]
    prompt = ChatPromptTemplate.from_messages([("human", TEMPLATE)])
    chain = prompt | ChatRagCache(rag=rag, max_tokens=max_tokens) | StrOutputParser()
    messages = [[{"role": "user", "content": TEMPLATE.format(**given)}] for given in inputs]
    engine = RetrieverQueryEngine.from_args(
        Given(chunks),
        llm=RagCacheLLM(rag=rag, max_tokens=max_tokens),
        text_qa_template=PromptTemplate(NODE_TEMPLATE),
    )

    async def gathered() -> Answers:
        return [str(answer) for answer in await asyncio.gather(*map(engine.aquery, chunks))]

    def generate(one: Any) -> str:
        return rag.generate(one, max_new_tokens=max_tokens, do_sample=False).text

    return {
        "LangChain": {
            "invoke": lambda: [chain.invoke(given) for given in inputs],
            "generate": lambda: [generate(one) for one in messages],
            "batch": lambda: chain.batch(inputs),
            "abatch": lambda: asyncio.run(chain.abatch(inputs)),
        },
        "LlamaIndex": {
            "query": lambda: [str(engine.query(question)) for question in chunks],
            "aquery, gathered": lambda: asyncio.run(gathered()),
        },
    }


def measure(ways: Ways, runs: int, bar: tqdm[Any]) -> list[dict[str, Any]]:
    """Rows of the ways of one framework; RagCacheError where one answers otherwise than the first."""
    first, *_ = ways
    expected = ways[first]()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, ask in ways.items():
            start = time.perf_counter()
            answers = ask()
            times[name].append(time.perf_counter() - start)
            if answers != expected:
                raise RagCacheError(f"{name} answers otherwise than {first}; no figures are given")
        bar.update()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return [
        {
            "way": name,
            "questions": len(expected),
            "seconds": medians[name],
            "seconds_min": min(values),
            "seconds_max": max(values),
            "speedup": medians[first] / medians[name],
            "runs": runs,
        }
        for name, values in times.items()
    ]
