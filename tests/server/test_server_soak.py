"""Many clients, some of which go away, send nonsense or have no key: nothing leaks, nothing is shared."""

import gc
import json
import random
import threading
import time
from collections import Counter

import httpx
import psutil
import pytest

from engine_kit import FOLDER, stored_in
from ragcachekit import QueueConfig, RagCache, StoreConfig
from ragcachekit.server import ServerConfig, create_app
from ragcachekit.server.keys import add_key
from server_kit import DOCUMENTS, LONG, MODEL, QUESTION, engine, served, until
from snapshots_kit import hybrid_speaker
from soak_kit import figures
from speaking import byte_level

CLIENTS, REQUESTS = 32, 1000
BODY = 1 << 16
CHAT, CONTEXTS = "/v1/chat/completions", "/v1beta/cachedContents"


class Client:
    """One client of a tenant: each method is one request, and returns its status and the right one."""

    def __init__(self, url, key, seed):
        self.http = httpx.Client(base_url=url, timeout=LONG, headers={"Authorization": f"Bearer {key}"})
        self.draw, self.key = random.Random(seed), key

    def body(self, **changes):
        content = " ".join(self.draw.choices(QUESTION.split(), k=self.draw.randint(3, 30)))
        documents = self.draw.sample(DOCUMENTS, self.draw.randint(0, 3))
        base = {"model": MODEL, "messages": [{"role": "user", "content": content}], "documents": documents}
        return {**base, "max_tokens": self.draw.randint(1, 12), **changes}

    def post(self, **changes):
        return self.http.post(CHAT, json=self.body(**changes))

    def answered(self):
        response = self.post(n=self.draw.choice([1, 1, 2]), temperature=self.draw.choice([0, 1.0]))
        return response.status_code, 200

    def streamed(self):
        response = self.post(stream=True, stream_options={"include_usage": True})
        assert response.text.endswith("data: [DONE]\n\n")
        return response.status_code, 200

    def stream_left(self):
        with self.http.stream("POST", CHAT, json=self.body(stream=True, max_tokens=200)) as response:
            for number, _ in enumerate(response.iter_lines()):
                if number == self.draw.randint(0, 9):
                    break
        return response.status_code, 200

    def answer_left(self):
        try:
            body = self.body(max_tokens=200)
            return self.http.post(CHAT, json=body, timeout=self.draw.uniform(0.01, 0.3)).status_code, 200
        except httpx.TimeoutException:
            return None, None

    def refused(self):
        long, key = (
            [{"role": "user", "content": "Berlin " * 600}],
            self.draw.choice(["", f"Bearer {self.key[:-1]}"]),
        )
        changes, status = self.draw.choice(
            [({"foo": 1}, 400), ({"model": "other"}, 404), ({"messages": long}, 400)]
        )
        response, status = self.draw.choice([
            lambda: (self.post(**changes), status),
            lambda: (self.http.post(CHAT, content=b'{"model": ' + b"[" * 300), 400),
            lambda: (self.http.post(CHAT, content=b" " * (BODY + 1)), 413),
            lambda: (self.http.post(CHAT, json=self.body(), headers={"Authorization": key}), 401),
        ])()  # fmt: skip
        return response.status_code, status

    def context(self):
        parts = [{"text": f"{self.draw.random()} {text}"} for text in DOCUMENTS]
        made = self.http.post(CONTEXTS, json={"model": MODEL, "contents": [{"parts": parts}], "ttl": "60s"})
        name = made.json()["name"]
        asked = self.post(cached_content=name).json()
        assert asked["usage"]["prompt_tokens_details"]["cached_tokens"] > 50, asked
        gone = self.http.delete(f"/v1beta/{name}").status_code
        return (made.status_code, gone, self.post(cached_content=name).status_code), (200, 200, 404)


KINDS = (
    *([Client.answered] * 5), *([Client.streamed] * 3), *([Client.stream_left, Client.answer_left] * 3),
    *([Client.refused] * 6), Client.context,
)  # fmt: skip


def flood(clients, count, seen):
    """``count`` requests, each client one after the other."""
    failures = []

    def work(client, own):
        for _ in range(own):
            kind = client.draw.choice(KINDS)
            try:
                status, right = kind(client)
            except Exception as error:
                status, right = repr(error), None
            seen[kind.__name__] += 1
            if status != right:
                failures.append((kind.__name__, status, right))

    shares = [count // CLIENTS + (number < count % CLIENTS) for number in range(CLIENTS)]
    threads = [threading.Thread(target=work, args=pair) for pair in zip(clients, shares, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def usage_now(process, rag):
    until(lambda: not (rag.queue.waiting or rag.queue.running))
    rag.flush()
    gc.collect()
    return process.num_fds(), threading.active_count(), process.memory_info().rss / 2**20


def hybrid(**options):
    """A tree so small that it is full after 1,000 requests, and keeps a context that is about to be used."""
    store = StoreConfig(host_bytes=6 << 20, eviction="lru")
    own = {"cold": "now", "store": store, "cache_dir": FOLDER.name}
    return RagCache(hybrid_speaker(), byte_level(), **own, **options)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("open_engine", "warm_up"), [(engine, 300), (hybrid, 1000)], ids=["linked", "prefix"]
)
def test_a_flood_of_clients(tmp_path, open_engine, warm_up):
    keys, process, seen = tmp_path / "keys.json", psutil.Process(), Counter()
    tenants = {name: add_key(keys, name) for name in ("ada", "bob")}
    with open_engine(queue=QueueConfig(max_batch=8)) as rag:
        app = create_app(rag, ServerConfig(MODEL, keys=keys, max_body_bytes=BODY))
        with served(app) as url:
            own = list(tenants.values())
            clients = [Client(url, own[number % 2], number) for number in range(CLIENTS)]
            try:
                flood(clients, warm_up, seen)
                before = usage_now(process, rag)
                begun = time.perf_counter()
                flood(clients, REQUESTS, seen)
                seconds = time.perf_counter() - begun
                after = usage_now(process, rag)
                shared(rag, url, tenants)
            finally:
                for client in clients:
                    client.http.close()
        stats = rag.queue.stats()
    counts = {"before": before, "after": after, "kinds": dict(seen), "done": stats.done}
    figures("flood", grade=rag.grade, seconds=round(seconds, 1), **counts)
    assert stats.submitted == stats.done + stats.cancelled
    assert stats.cancelled > 0
    assert after[0] <= before[0] + 8  # connections that clients hold open differ by what was left last
    assert after[1] <= before[1] + 2
    assert after[2] < before[2] * 1.05


def shared(rag, url, tenants):
    """What one tenant has cached, the other does not find; no entry has two owners."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1}
    body["documents"] = [f"{DOCUMENTS[0]} Ada alone knows this."]
    cached = []
    for name in ("ada", "ada", "bob"):
        headers = {"Authorization": f"Bearer {tenants[name]}"}
        answer = httpx.post(url + CHAT, content=json.dumps(body), headers=headers, timeout=LONG).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] < 10  # the template's first tokens, which each tenant has for itself
    assert cached[1] > 20
    owned = {(key.chunk_id, key.namespace) for key in stored_in(rag)}
    if rag.grade == "prefix":
        tops = [
            (root, top) for root, tops in rag.components.tree.levels.roots.items() for top in tops.values()
        ]
        owned = {(node.step.ids[-1], root.namespace) for root, top in tops for node in top.subtree()}
    assert {namespace for _, namespace in owned} == set(tenants)
    assert len({name for name, _ in owned}) == len(owned)
