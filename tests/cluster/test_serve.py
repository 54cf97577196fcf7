"""Two replicas of a tiny model behind Ray Serve: unchanged clients, chunks that find their replica."""

import asyncio
import random
import socket
import sys

import openai
import pytest
import ray
from ray import serve

from benchmarks.cluster import serve_routing
from benchmarks.cluster.serve_routing import OURS
from ragcachekit.cluster.app import AppSettings, build_app
from ragcachekit.server.keys import add_key
from speaking import WORDS, byte_level, speaker

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]


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
    return [" ".join([f"Part {part}.", *draw.choices(words, k=40)]) for part in range(4)]


async def ask(client, texts, question="Where does the river flow?", **options):
    return await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": question}],
        max_tokens=2,
        extra_body={"documents": texts, **options},
    )


def test_chunks_find_their_replica():
    """Over a corpus of which a replica's memory holds a tenth."""
    report = serve_routing.run(serve_routing.Workload(requests=600), ("round robin", "first chunk", OURS), 1)
    even, first, ours = report.rows
    sys.stdout.write(f"{[(row['router'], row['hit_rate'], row['requests']) for row in report.rows]}\n")
    assert ours["hit_rate"] >= 1.3 * even["hit_rate"]  # seen: 1.40 to 1.60
    assert ours["hit_rate"] >= 1.2 * first["hit_rate"]
    assert ours["requests"] <= 1.3


async def test_clients_see_one_server(model, run, tmp_path):
    keys = tmp_path / "keys.json"
    key, other = add_key(keys, "one"), add_key(keys, "two")
    url = run(model=str(model), host_gb=0.1, keys=keys, contexts=tmp_path / "contexts")
    texts = documents()
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
