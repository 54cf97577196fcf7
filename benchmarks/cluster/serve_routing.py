"""``python -m benchmarks serve-routing``: routers measured with two replicas under Ray Serve."""

from __future__ import annotations

import asyncio
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import openai
import ray
import torch
import typer
from ray import serve
from tqdm.auto import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.cluster.ray_routers import PLACE
from benchmarks.cluster.route_simulation import ROUTERS
from benchmarks.cluster.route_simulation import zipf as zipf_draws
from ragcachekit.cluster.app import AppSettings, build_app
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import show, written
from ragcachekit.commands.report import BenchReport
from ragcachekit.model.loading import resolve_model

WORDS = "river town bridge market stone winter letter engine harbour garden window paper road night council"
QUESTION = "Which of these is the oldest?"
CONNECTIONS = 4
OURS, EVEN = "chunk sets", "round robin"


def serve_routing(
    requests: Annotated[int, typer.Option(min=3)] = 900,
    zipf: float = 0.8,
    cache: Annotated[float, typer.Option(help="A replica's memory, as a share of the corpus.")] = 0.1,
    routers: Annotated[str, typer.Option(help="With commas.")] = ",".join(ROUTERS),
    runs: Annotated[int, typer.Option(min=1)] = 3,
    json: opt.Json = None,
) -> None:
    """Hit rate and load of two replicas under Ray Serve, by router.

    Random weights with the sample model's tokenizer answer requests over HTTP, each with chunks of one topic
    in random order, topics by Zipf. ``hit_rate`` is the share of chunk tokens that were cached, over the last
    two thirds of the requests. ``ceiling`` is that of replicas that hold the topics that are asked most, from
    the start and without overlap. All routers get the same requests.
    """
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        report = run(Workload(requests=requests, zipf=zipf, cache=cache), opt.names(routers), runs)
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
    show(report.table("Routing with two replicas"))
    written(report, json)


@dataclass(frozen=True)
class Workload:
    """Requests over ``topics`` of ``per_topic`` chunks, of which each request has ``chunks``."""

    topics: int = 60
    per_topic: int = 6
    chunks: int = 4
    zipf: float = 0.8
    cache: float = 0.1
    requests: int = 900

    def corpus(self) -> list[list[str]]:
        """The chunks of every topic."""
        draw, words = random.Random(3), WORDS.split()
        return [
            [
                f"Topic {topic}, {part}: {' '.join(draw.choices(words, k=40))}."
                for part in range(self.per_topic)
            ]
            for topic in range(self.topics)
        ]

    def asked(self, seed: int) -> Iterator[list[str]]:
        """The documents of each request, in its order."""
        corpus, draw = self.corpus(), random.Random(seed)
        topics = zipf_draws(self.topics, self.zipf, draw)
        return (draw.sample(corpus[next(topics)], self.chunks) for _ in range(self.requests))

    def ceiling(self, replicas: int) -> float:
        """Share of the requests that are about the topics all replicas can hold together."""
        weights = [float((topic + 1) ** -self.zipf) for topic in range(self.topics)]
        return sum(weights[: int(replicas * self.cache * self.topics)]) / sum(weights)


def tiny_model(folder: Path, tokenizer: Any) -> int:
    """Write a model of random weights; returned are the bytes of a token's KV."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head_dim, float32


def measure(
    model: Path, router: str, host_gb: float, asked: Sequence[list[str]], tokens: Callable[[str], int]
) -> dict[str, float]:
    """Figures of one router with two replicas; ``tokens`` counts the tokens of a chunk."""
    settings = AppSettings(
        model=str(model), model_name="tiny", policy="reuse", cpus=0.5, publish_seconds=0.5, host_gb=host_gb
    )
    if router != OURS:
        number = list(ROUTERS).index(router)
        settings = settings.model_copy(update={"router": PLACE, "router_options": {"number": number}})
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(build_app(settings))
        begin = time.perf_counter()
        cached, before = asyncio.run(_ask_all(f"http://127.0.0.1:{port}/v1", asked, router))
        seconds, load = time.perf_counter() - begin, _answered()
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
    if sum(load) != len(asked) + 1:
        raise RuntimeError(f"{len(asked) + 1} requests were sent, and the replicas had {load}")
    counted = slice(len(asked) // 3, None)
    hits = sum(found - before for found in cached[counted])
    total = sum(tokens(text) for texts in asked[counted] for text in texts)
    return {"hit_rate": hits / total, "requests": max(load) / statistics.mean(load), "seconds": seconds}


async def _ask_all(url: str, asked: Sequence[list[str]], router: str) -> tuple[list[int], int]:
    """Cached tokens of each request, and of one whose chunks nobody has had: those before its first chunk."""
    cached, gate = [0] * len(asked), asyncio.Semaphore(CONNECTIONS)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def ask(texts: Sequence[str]) -> int:
            answer = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=1,
                extra_body={"documents": list(texts)},
            )
            usage: Any = answer.usage
            return int(usage.prompt_tokens_details.cached_tokens)

        with tqdm(total=len(asked), desc=router, unit="request", leave=False) as bar:

            async def one(number: int) -> None:
                async with gate:
                    cached[number] = await ask(asked[number])
                bar.update()

            await asyncio.gather(*map(one, range(len(asked))))
        return cached, await ask(["Nobody has asked about this. " * 8])


def _answered() -> list[int]:
    """Requests that each replica has had."""
    named = ray.util.list_named_actors(all_namespaces=True)
    actors = [ray.get_actor(**one) for one in named if "#replicas#" in one["name"]]
    found: Any = ray.get([one.record_routing_stats.remote() for one in actors])
    return [stats["answered"] for stats in found]


def run(workload: Workload, routers: Sequence[str], runs: int) -> BenchReport:
    """A row per router: means over ``runs``, each with requests of its own."""
    found: dict[str, list[dict[str, float]]] = {router: [] for router in routers}
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("sample"))

    def tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        corpus = sum(tokens(text) for texts in workload.corpus() for text in texts)
        host_gb = workload.cache * corpus * tiny_model(model, tokenizer) / 1e9
        for seed in tqdm(range(runs), unit="run"):
            asked = list(workload.asked(seed))
            for router in routers:
                found[router].append(measure(model, router, host_gb, asked, tokens))
    rows = []
    for router, results in found.items():
        row: dict[str, Any] = {"router": router, "runs": runs}
        for name in ("hit_rate", "requests", "seconds"):
            row |= _spread(name, [one[name] for one in results])
        if EVEN in found:
            pairs = zip(results, found[EVEN], strict=True)
            row |= _spread("times_round_robin", [one["hit_rate"] / even["hit_rate"] for one, even in pairs])
        rows.append({**row, "ceiling": workload.ceiling(2)})
    return BenchReport("serve-routing", "random weights, two replicas", 0, tuple(rows))


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: statistics.mean(values), f"{name}_min": min(values), f"{name}_max": max(values)}
