"""Thousands of requests with random ends: every one ends, and nothing is left behind."""

import gc
import logging
import os
import random
import threading
import time
from collections import Counter

import pytest

from engine_kit import chunk, ids, text, warmed
from families import greedy, plain
from queue_kit import LONG
from ragcachekit import Cancelled, CancelScope, DeadlineExceeded, Prompt, QueueConfig, QueueFull, StoreConfig
from ragcachekit.engine.request import Request
from ragcachekit.errors import EngineError
from ragcachekit.forward.decode import RequestKV
from ragcachekit.forward.linker import LinkedCache
from ragcachekit.generate.batch import Decoding
from snapshots_kit import model_of, rag_of
from soak_kit import figures, soaked

PROMPTS = [
    Prompt([text(9, 1), chunk(20 + i, 10 + i), chunk(15 + i, 30 + i % 3), text(4, i)]) for i in range(12)
]
ASKED = {"do_sample": False, "eos_token_id": -1}
TENANTS = ("a", "b", "c", "default")
WINDOW = 4
HELD = (RequestKV, LinkedCache, Decoding, Request)
"""What holds KV for a request; an idle engine has as many as before."""


class Torn(Exception):
    pass


def own_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("ragcachekit")]


def resources(rag):
    gc.collect()
    threads = own_threads()
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    runner = rag.queue.runner
    left = (len(runner.runs), len(runner.decoder.active))
    held = Counter(type(one).__name__ for one in gc.get_objects() if type(one) in HELD)
    return {"threads": threads, "files": files, "left": left, "held": held}


def idle(rag):
    """What an engine holds once its threads have ended."""
    assert rag.queue.drain(LONG)
    assert rag.flush(LONG)
    end = time.monotonic() + LONG
    while own_threads():
        assert time.monotonic() < end
        time.sleep(0.05)
    return resources(rag)


def disturbed(rag, draw):
    """Fail some plans, prefills and steps at random."""
    runner, decoder = rag.queue.runner, rag.queue.runner.decoder
    planner = rag.components.planner
    for owner, name, often in ((planner, "plan", 0.02), (decoder, "begin", 0.03), (decoder, "step", 0.003)):
        works = getattr(owner, name)

        def sometimes(*args, works=works, often=often, **options):
            if draw.random() < often:
                raise Torn
            return works(*args, **options)

        setattr(owner, name, sometimes)
    return runner


def client(rag, number, count, want, outcomes):
    draw = random.Random(number)
    for _ in range(count):
        which, new = draw.randrange(len(PROMPTS)), draw.randint(1, 12)
        asked = {**ASKED, "max_new_tokens": new, "namespace": draw.choice(TENANTS)}
        asked["deadline"] = draw.choice([None, None, None, 0.0, 0.05])
        try:
            with CancelScope() as scope:
                try:
                    request = rag.submit(PROMPTS[which], wait=draw.choice([True, False]), **asked)
                except QueueFull:
                    outcomes["full"] += 1
                    continue
                how = draw.random()
                if how < 0.1:
                    request.cancel()
                elif how < 0.15:
                    scope.cancel()
                elif how < 0.25:
                    next(iter(request.stream()), None)  # and leaves
                elif how < 0.3:
                    threading.Timer(draw.random() * 0.05, request.cancel).start()
                answer = request.result(LONG)
            outcomes[answer.report.finish_reason] += 1
            assert answer.token_ids == want[which][: len(answer.token_ids)]
            assert answer.report.finish_reason == "cancelled" or len(answer.token_ids) == new
        except (DeadlineExceeded, EngineError, Torn, Cancelled) as error:
            outcomes[type(error).__name__] += 1


def run(rag, requests, threads=16):
    # Everything is computed, or exact: whatever is reused, answers are those of the model.
    model = plain("llama") if rag.grade == "linked" else model_of("qwen3_5")
    want = [greedy(model, ids(prompt), 12, eos_token_id=-1) for prompt in PROMPTS]
    rag.submit(PROMPTS[0], **ASKED, max_new_tokens=2).result(LONG)
    before, submitted = idle(rag), rag.queue.stats().submitted
    disturbed(rag, random.Random(1))
    outcomes, failed = Counter(), []

    def serve(number):
        try:
            client(rag, number, requests // threads, want, outcomes)
        except BaseException as error:
            failed.append(error)

    clients = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(threads)]
    begun = time.monotonic()
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(1200)
    seconds = time.monotonic() - begun
    assert not failed, failed
    assert not any(thread.is_alive() for thread in clients)
    after, stats = idle(rag), rag.queue.stats()
    assert outcomes.total() == requests // threads * threads
    assert stats.submitted - submitted == requests // threads * threads - outcomes["full"]
    assert stats.done + stats.cancelled + stats.expired + stats.failed == stats.submitted
    assert after == before
    assert stats.most_overtaken <= WINDOW
    assert {"length", "cancelled", "DeadlineExceeded", "Cancelled"} <= outcomes.keys()
    return {**stats.to_dict(), "seconds": round(seconds, 1), "outcomes": dict(outcomes)}


@pytest.fixture(params=soaked(("linked", "prefix"), "linked"))
def rag(request, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "ragcachekit")  # pytest keeps logged errors, and they their frames
    queue = QueueConfig(max_batch=6, max_waiting=12, window=WINDOW)
    store = StoreConfig(host_bytes=1 << 20, disk_path=tmp_path)
    own = {"cold": "background", "store": store, "queue": queue}
    linked = request.param == "linked"
    with warmed("llama", policy="lego:1000", **own) if linked else rag_of("qwen3_5", **own) as rag:
        yield rag


def test_hundreds_of_requests_with_random_ends(rag):
    run(rag, 64)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_requests_with_random_ends(rag):
    figures("queue", grade=rag.grade, **run(rag, 10_000))
