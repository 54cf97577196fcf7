"""``python -m benchmarks shared-kv``: requests over the same chunks, decoded together."""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from tqdm.auto import tqdm

from benchmarks.serve.systems import TokenTimes
from benchmarks.serve.workload import Ids, text_documents
from ragcachekit import Chunk, Prompt, QueueConfig, RagCache, Text
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, show, written
from ragcachekit.commands.report import BenchReport
from ragcachekit.errors import RagCacheError
from ragcachekit.forward import decode
from ragcachekit.model.kv import KVLayout
from ragcachekit.types import DEFAULT_POLICY

WAYS = {"own": sys.maxsize, "shared": decode.MIN_SHARED}
"""Least rows that are shared: with ``own``, none are."""

SUBJECTS = (
    *("chunks", "policies", "the store", "a namespace", "deadlines", "the disk", "memory", "a prompt"),
    *("tokens", "the model", "a batch", "an index", "encoders", "the queue", "tests", "limits"),
)
MB = 1 << 20


def shared_kv(
    model: str = "sample",
    corpus: Annotated[str, typer.Option(help="Documents are cut from this folder.")] = "docs",
    policy: opt.Policy = DEFAULT_POLICY,
    requests: Annotated[str, typer.Option(help="At once, with commas.")] = "1,4,16",
    chunks: Annotated[int, typer.Option(min=1, help="In every prompt.")] = 5,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Of each.")] = 190,
    max_new_tokens: opt.MaxNewTokens = 32,
    limit: Annotated[int, typer.Option(min=1, help="Requests whose own KV fills the memory of a batch.")] = 4,
    runs: Annotated[int, typer.Option(min=1)] = 5,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    json: opt.Json = None,
) -> None:
    """Memory and speed of requests over the same chunks: each with KV of its own, and sharing beginnings.

    Prompts have the same documents in the same order, and other questions. The ways take turns on one engine.
    ``kv_mb`` is held per request while the last token is chosen; ``step_ms`` is the median time between two
    tokens of the request that begins last, in CPU time of the engine's thread; ``tokens_per_s`` counts the
    prefills, too, by the clock. The last rows have
    memory for the KV of ``limit`` requests. Every answer must be that of the request alone.
    """
    quiet_loading()
    counts = [int(count) for count in opt.numbers("--requests", requests)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ragcachekit-bench-") as folder:

        def opened(batch_bytes: int | None) -> RagCache:
            queue = QueueConfig(max_batch=max(counts), max_waiting=max(counts), batch_bytes=batch_bytes)
            named: dict[str, Any] = {"dtype": dtype, "policy": policy, "cache_dir": folder, "queue": queue}
            return RagCache.from_pretrained(model, **named)

        with opened(16 << 30) as rag:
            prompts = _prompts(rag, corpus, chunks, chunk_tokens, max(counts))
            _warm(rag, prompts[0])
            alone: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
            expected = [rag.generate(prompt, **alone).token_ids for prompt in prompts]
            for count in counts:
                rows += _measured(rag, prompts[:count], expected, max_new_tokens, runs)
            tokens = max(len(rag.prepare(prompt).token_ids) for prompt in prompts) + max_new_tokens
            size = limit * tokens * KVLayout.of(rag.model).token_bytes
        with opened(size) as rag:
            _warm(rag, prompts[0])
            measured = _measured(rag, prompts, expected, max_new_tokens, runs)
            rows += [{**row, "limit_mb": size / MB} for row in measured]
    report = BenchReport("shared-kv", f"{model}, {dtype}, {policy}, {tokens} tokens each", 0, tuple(rows))
    show(report.table(f"{chunks} chunks for all requests: {report.model}"))
    written(report, json)


def _prompts(rag: RagCache, corpus: str, chunks: int, chunk_tokens: int, count: int) -> list[Prompt]:
    documents = text_documents(rag.tokenizer, chunks, chunk_tokens, corpus=corpus)
    common = [Text(token_ids=documents.system), *(Chunk(token_ids=ids) for ids in documents.chunks)]
    asked = [
        f"\n\nQuestion: What is said about {SUBJECTS[n % len(SUBJECTS)]}?\nAnswer:" for n in range(count)
    ]
    ids = [rag.tokenizer(text, add_special_tokens=False).input_ids for text in asked]
    return [Prompt([*common, Text(token_ids=tuple(one))]) for one in ids]


def _warm(rag: RagCache, prompt: Prompt) -> None:
    """Encode the chunks of all prompts."""
    rag.model.generation_config.eos_token_id = None  # all answers have the same length
    for _ in range(3):  # a mean of several contexts is complete after that
        rag.generate(prompt, max_new_tokens=1)
        rag.flush()


class _Watch(TokenTimes):
    """Notes when tokens came, and how many bytes of KV the batch held at the last."""

    def __init__(self, rag: RagCache, new_tokens: int) -> None:
        self.times: list[float] = []
        self.cpu: list[float] = []  # whatever else runs on the machine
        super().__init__(self.times)
        self._rag, self._new_tokens, self.held = rag, new_tokens, 0

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        self.cpu.append(time.thread_time())
        if len(self.times) == self._new_tokens:
            active = self._rag.queue.runner.decoder.active
            self.held = held_bytes(one.kv for one in active if one.kv is not None)


def held_bytes(requests: Iterable[decode.RequestKV]) -> int:
    """Bytes of the storages that requests hold, each counted once."""
    sides = [
        side for request in requests for _, _, part in request.parts for side in (*part.keys, *part.values)
    ]
    storages = {side.untyped_storage().data_ptr(): side.untyped_storage().nbytes() for side in sides}
    return sum(storages.values())


def _measured(
    rag: RagCache, prompts: Sequence[Prompt], expected: Sequence[Ids], new_tokens: int, runs: int
) -> list[dict[str, Any]]:
    """A row per way; RagCacheError if an answer is not the one of its request alone."""
    figures: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    batches: dict[str, int] = {}
    for run in tqdm(range(runs), f"{len(prompts)} requests", leave=False):
        for way in WAYS if run % 2 == 0 else reversed(WAYS):
            with patch.object(decode, "MIN_SHARED", WAYS[way]):
                watches, begun = [_Watch(rag, new_tokens) for _ in prompts], time.perf_counter()
                asked = [
                    rag.submit(prompt, streamer=watch, max_new_tokens=new_tokens, do_sample=False)
                    for prompt, watch in zip(prompts, watches, strict=True)
                ]
                answers = [request.result() for request in asked]
            seconds = max(watch.times[-1] for watch in watches) - begun
            if [answer.token_ids for answer in answers] != list(expected[: len(prompts)]):
                raise RagCacheError(
                    f"{way}: an answer is not that of its request alone; no figures are given"
                )
            batches[way] = max(answer.report.batch for answer in answers)
            last = max(watches, key=lambda watch: watch.times[0])
            step = statistics.median(b - a for a, b in itertools.pairwise(last.cpu[1:]))
            held = max(watch.held for watch in watches) / batches[way] / MB
            figures[way].append((held, step * 1e3, len(prompts) * new_tokens / seconds))
    return [
        {
            "requests": len(prompts),
            "limit_mb": None,
            "way": way,
            "together": batches[way],
            "kv_mb": statistics.median(held),
            "step_ms": statistics.median(step),
            "step_ms_min": min(step),
            "step_ms_max": max(step),
            "tokens_per_s": statistics.median(speed),
            "tokens_per_s_min": min(speed),
            "tokens_per_s_max": max(speed),
            "runs": runs,
        }
        for way, figure in figures.items()
        for held, step, speed in [list(zip(*figure, strict=True))]
    ]
