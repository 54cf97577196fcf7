"""Two replicas of a tiny model behind Ray Serve: unchanged clients, chunks that find their replica."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import time

import openai
import pytest
import ray
from ray import serve

from ragcachekit.cluster.app import AppSettings, build_app
from ragcachekit.server.keys import add_key
from speaking import WORDS, byte_level, speaker

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]

POWER_OF_TWO = "ray.serve._private.request_router.pow_2_router:PowerOfTwoChoicesRequestRouter"
TOPICS, PER_TOPIC, PER_REQUEST = 30, 4, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    speaker(max_position_embeddings=4096).save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False)
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
def run():
    """Run the application on a free port; gives its address."""

    def start(**settings):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app(AppSettings(cpus=0.5, publish_seconds=0.5, model_name="tiny", **settings)))
        return f"http://127.0.0.1:{port}/v1"

    yield start
    serve.shutdown()


def documents():
    draw, words = random.Random(3), WORDS.split()
    return [
        [" ".join([f"Topic {topic}, part {part}.", *draw.choices(words, k=40)]) for part in range(PER_TOPIC)]
        for topic in range(TOPICS)
    ]


async def ask(client, texts, question="Where does the river flow?", **options):
    return await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": question}],
        max_tokens=2,
        extra_body={"documents": texts, **options},
    )


async def hit_rate(url, count):
    """Share of the prompt tokens that were cached, over the last two thirds of Zipf requests."""
    topics, draw = documents(), random.Random(5)
    weights = [1 / (rank + 1) for rank in range(TOPICS)]
    wanted = [draw.choices(topics, weights)[0] for _ in range(count)]
    found, gate = [], asyncio.Semaphore(4)

    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def one(texts):
            async with gate:
                answer = await ask(client, random.Random(len(found)).sample(texts, PER_REQUEST))
                found.append((answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens))

        await asyncio.gather(*map(one, wanted))
    counted = found[count // 3 :]
    return sum(cached for cached, _ in counted) / sum(total for _, total in counted)


def answered():
    """Requests that each replica has had."""
    named = ray.util.list_named_actors(all_namespaces=True)
    actors = [ray.get_actor(**one) for one in named if "#replicas#" in one["name"]]
    return [stats["answered"] for stats in ray.get([one.record_routing_stats.remote() for one in actors])]


async def test_chunks_find_their_replica(model, run):
    """Three times as many chunks as a replica's memory holds: both together hold two thirds."""
    rates = {}
    for name, router in (("power of two", POWER_OF_TWO), ("chunk sets", "")):
        url = run(model=str(model), host_gb=0.0025, **({"router": router} if router else {}))
        begin = time.perf_counter()
        rates[name], load = await hit_rate(url, 600), answered()
        seconds = time.perf_counter() - begin
        sys.stdout.write(f"{name}: {rates[name]:.1%} cached, requests {load}, {seconds:.0f} s\n")
        assert sum(load) == 600
        assert max(load) / 300 <= 1.3
        serve.shutdown()
    assert rates["chunk sets"] > 1.1 * rates["power of two"]  # seen: 1.17 to 1.20


async def test_clients_see_one_server(model, run, tmp_path):
    keys = tmp_path / "keys.json"
    key, other = add_key(keys, "one"), add_key(keys, "two")
    url = run(model=str(model), host_gb=0.1, keys=keys, contexts=tmp_path / "contexts")
    texts = documents()[0]
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        assert [one.id async for one in client.models.list()] == ["tiny"]
        await ask(client, texts)
        await ask(client, texts[::-1])
        await asyncio.sleep(2)
        again = [(await ask(client, texts)).usage.prompt_tokens_details.cached_tokens for _ in range(6)]
        assert min(again[-3:]) > 0, again

        parts = []
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Where?"}], max_tokens=8, stream=True,
            stream_options={"include_usage": True}, extra_body={"documents": texts},
        )  # fmt: skip
        async for part in stream:
            parts.append(part)
        assert parts[-1].usage.completion_tokens > 0
        assert sum(len(part.choices) for part in parts) > 2

        with pytest.raises(openai.BadRequestError):
            await ask(client, texts, wrong_parameter=1)
        for _ in range(3):  # a client that goes away, then others as before
            with pytest.raises(openai.APITimeoutError):
                await ask(client.with_options(timeout=0.05), texts, question="Where? " * 100)
        assert (await ask(client, texts)).choices
    async with openai.AsyncOpenAI(base_url=url, api_key=other, max_retries=0) as client:
        assert (await ask(client, texts)).usage.prompt_tokens_details.cached_tokens == 0
    async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
        for _ in range(4):
            with pytest.raises(openai.AuthenticationError):
                await ask(client, texts)
    assert serve.status().applications["default"].status == "RUNNING"
