"""rag.submit: answers as generate gives them, in an order, with limits, deadlines and cancellation."""

import gc
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from engine_kit import EXACT, PROMPT, chunk, ids, rag_for, text, warmed
from families import greedy, plain
from loading_kit import SlowStore
from queue_kit import LONG, held, until
from ragcachekit import (
    Cancelled,
    CancelScope,
    DeadlineExceeded,
    Prompt,
    QueueConfig,
    QueueFull,
    TreeConfig,
    agenerate,
)
from ragcachekit.errors import Closed
from ragcachekit.reports import GenerateReport
from ragcachekit.store.memory import HostStore
from ragcachekit.store.tiered import TieredStore
from soak_kit import soaked

ASKED = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
OTHER = Prompt([text(9, 1), chunk(25, 3), chunk(33, 2), text(6, 5)])
PROMPTS = [PROMPT, EXACT, OTHER, Prompt([text(30, 12)]), Prompt([chunk(25, 3), text(7, 33)])]
LONG_ANSWER = {**ASKED, "max_new_tokens": 40}
WAYS = (("full", 1), ("lego:4", 3), ("prefix", 3))


@pytest.mark.parametrize(
    ("name", "policy", "batch"),
    soaked(
        [("gemma3", "full", 3), ("gemma3", "lego:4", 1), *(kept := [("llama", *way) for way in WAYS])], *kept
    ),
)
def test_answers_are_those_of_generate_under_random_arrivals(name, policy, batch):
    tree = TreeConfig(host_bytes=1 << 24) if policy == "prefix" else None
    options = {"policy": policy, "tree": tree, "queue": QueueConfig(max_batch=batch)}
    draw = random.Random(f"{name}{policy}{batch}")
    with warmed(name, *PROMPTS, **options) as rag:
        rag.after_answer.cold = "never"
        asked = [(p, {**ASKED, "max_new_tokens": draw.randint(1, 12)}) for p in PROMPTS * 2]
        draw.shuffle(asked)
        want = [rag.generate(prompt, **options).token_ids for prompt, options in asked]
        requests = []
        for prompt, options in asked:
            time.sleep(draw.random() * 0.01)
            requests.append(rag.submit(prompt, **options))
            if draw.random() < 0.3:  # one more, that does not matter to the others
                rag.submit(prompt, **LONG_ANSWER).cancel()
        assert [request.result(LONG).token_ids for request in requests] == want
        if policy == "full":
            assert want == [
                greedy(plain(name), ids(p), o["max_new_tokens"], eos_token_id=-1) for p, o in asked
            ]
        assert rag.queue.stats().mean_batch <= batch


def test_options_that_no_batch_decodes_run_alone_and_the_report_says_why():
    with warmed("llama", *PROMPTS, policy="lego:4") as rag:
        beams = {**ASKED, "num_beams": 2}
        want = [rag.generate(p, **beams) for p in PROMPTS]
        got = [r.result(LONG) for r in [rag.submit(p, **beams) for p in PROMPTS]]
        assert [a.token_ids for a in got] == [a.token_ids for a in want]
        assert any("num_beams" in note for note in got[0].report.link.notes)
        assert not any("alone" in n for n in rag.submit(PROMPT, **ASKED).result().report.link.notes)


def test_a_report_counts_from_the_submission():
    with warmed("llama", PROMPT) as rag:
        with held(rag):
            requests = [rag.submit(PROMPT, **ASKED) for _ in range(3)]
            time.sleep(0.05)
        reports = [request.result(LONG).report for request in requests]
    for report in reports:
        assert isinstance(report, GenerateReport)
        assert 50 <= report.queue_ms < report.ttft_ms < report.total_ms
        assert 1 <= report.batch <= 3
    assert max(report.batch for report in reports) > 1
    assert "in the queue, decoded in a batch of" in str(reports[0])
    assert all(report.link.link_ms < report.total_ms - report.queue_ms for report in reports)


def test_the_cached_come_first_and_a_tenants_own_order_is_fair():
    cold = [Prompt([text(9, 1), chunk(60, 50 + i), text(6, 5)]) for i in range(3)]
    with warmed("llama", PROMPT, policy="reuse", cold="now") as rag:
        rag.after_answer.cold = "never"
        with held(rag) as turns:
            requests = [rag.submit(prompt, **ASKED) for prompt in [*cold, PROMPT, EXACT]]
        for request in requests:
            request.result(LONG)
        assert [requests.index(turn) for turn in turns] == [3, 4, 0, 1, 2]
        with held(rag) as turns:
            many = [rag.submit(prompt, namespace="many", **ASKED) for prompt in cold * 3]
            few = [rag.submit(prompt, namespace="few", **ASKED) for prompt in cold[:2]]
        for request in [*many, *few]:
            request.result(LONG)
        assert max(turns.index(request) for request in few) <= 4


def test_a_full_queue_says_what_to_do_and_waits_where_asked():
    with warmed("llama", PROMPT, queue=QueueConfig(max_waiting=2)) as rag:
        with held(rag):
            waiting = [rag.submit(PROMPT, **ASKED) for _ in range(2)]
            with pytest.raises(QueueFull, match="wait="):
                rag.submit(PROMPT, **ASKED)
            with pytest.raises(QueueFull):
                rag.submit(PROMPT, wait=0.01, **ASKED)
            third = []
            thread = threading.Thread(
                target=lambda: third.append(rag.submit(PROMPT, wait=True, **ASKED)), daemon=True
            )
            thread.start()
            waiting[0].cancel()
            thread.join(LONG)
            assert third
            assert rag.queue.waiting == 2
        assert third[0].result(LONG).token_ids == waiting[1].result(LONG).token_ids
        assert len(rag.generate_batch([PROMPT] * 9, **ASKED)) == 9


def test_a_request_may_be_cancelled_before_and_after_its_turn():
    with warmed("llama", PROMPT) as rag:
        want = rag.generate(PROMPT, **LONG_ANSWER).token_ids
        seen = []

        def put(value):
            seen.append(value)
            if len(seen) == 4:  # the prompt and three tokens
                other.cancel()

        with held(rag):
            waiting = rag.submit(PROMPT, **LONG_ANSWER)
            streamer = SimpleNamespace(put=put, end=lambda: None)
            other = rag.submit(PROMPT, streamer=streamer, **LONG_ANSWER)
            assert (waiting.state, waiting.done()) == ("waiting", False)
            waiting.cancel()
            assert (waiting.state, waiting.cancelled()) == ("done", True)
            assert waiting.result().token_ids == ()
        answer = other.result(LONG)
        assert answer.report.finish_reason == "cancelled"
        assert answer.token_ids == want[: len(answer.token_ids)]
        assert 3 <= len(answer.token_ids) < 40
        other.cancel()  # may be repeated
        assert rag.submit(PROMPT, **LONG_ANSWER).result(LONG).token_ids == want
        stats = rag.queue.stats()
        assert (stats.submitted, stats.cancelled, stats.done) == (5, 2, 3)


def test_a_deadline_ends_a_request_that_waits_or_runs():
    with warmed("llama", PROMPT) as rag:
        with held(rag):
            late, early = (rag.submit(PROMPT, deadline=seconds, **ASKED) for seconds in (0.0, LONG))
            with pytest.raises(DeadlineExceeded, match="waiting"):
                late.result(LONG)
        assert early.result(LONG).token_ids
        step, runner = rag.queue.runner.step, rag.queue.runner
        runner.step = lambda: (time.sleep(0.02), step())[1]
        with pytest.raises(DeadlineExceeded, match="running"):
            rag.submit(PROMPT, deadline=0.2, **{**ASKED, "max_new_tokens": 200}).result(LONG)
        assert rag.queue.drain(LONG)
        assert rag.queue.stats().expired == 2
        assert not rag.queue.runner.decoder.active


async def test_what_waits_for_room_ends_by_its_scope_or_deadline():
    with warmed("llama", PROMPT, queue=QueueConfig(max_waiting=1)) as rag, CancelScope() as scope:
        with held(rag):
            rag.submit(PROMPT, **ASKED)
            with pytest.raises(DeadlineExceeded):
                rag.submit(PROMPT, wait=True, deadline=0.01, **ASKED).result(LONG)
            with pytest.raises(DeadlineExceeded):
                await agenerate(rag, PROMPT, deadline=0.01, **ASKED)
            threading.Timer(0.1, scope.cancel).start()
            with pytest.raises(Cancelled):
                rag.submit(PROMPT, wait=True, **ASKED).result(LONG)
        assert rag.queue.drain(LONG)
        stats = rag.queue.stats()
        assert (stats.submitted, stats.expired, stats.cancelled) == (5, 2, 2)


def test_a_scope_ends_its_requests_and_no_others():
    with warmed("llama", PROMPT) as rag:
        with held(rag):
            outside = rag.submit(PROMPT, **ASKED)
            with CancelScope() as scope:
                inside = rag.submit(PROMPT, **ASKED)
                scope.cancel()
                with pytest.raises(Cancelled):
                    inside.result(LONG)
                with pytest.raises(Cancelled):
                    rag.submit(PROMPT, **ASKED)
        assert inside.cancelled()
        assert outside.result(LONG).report.finish_reason == "length"


def test_timeouts_callbacks_and_streams():
    with warmed("llama", PROMPT) as rag:
        with held(rag):
            request, called = rag.submit(PROMPT, **ASKED), threading.Event()
            request.add_done_callback(lambda _: 1 / 0)
            request.add_done_callback(lambda r: called.set() if r is request else None)
            with pytest.raises(TimeoutError):
                request.result(0.01)
        answer = request.result(LONG)
        assert called.wait(LONG)
        again = []
        request.add_done_callback(again.append)
        assert again == [request]
        assert "".join(request.stream()) == answer.text


def test_close_finishes_what_runs_and_refuses_what_waits():
    rag = warmed("llama", PROMPT, queue=QueueConfig(max_batch=1))
    running = rag.submit(PROMPT, **LONG_ANSWER)
    until(lambda: running.state != "waiting")
    waiting = rag.submit(PROMPT, **LONG_ANSWER)
    rag.close()
    assert len(running.result(LONG).token_ids) == 40
    with pytest.raises(Closed):
        waiting.result(LONG)


def test_waiting_requests_that_miss_the_same_chunk_have_it_encoded_once():
    shared = [Prompt([text(9, 1), chunk(7, 80 + i), chunk(40, 70), text(6, i)]) for i in range(4)]
    with rag_for("llama", policy="reuse", cold="background") as rag:
        with held(rag):
            requests = [rag.submit(prompt, **ASKED) for prompt in shared]
        reports = [request.result(LONG).report.link for request in requests]
    assert [[use.source for use in report.chunks] for report in reports] == [["computed", "host"]] * 4
    assert sum("encoded before it" in " ".join(report.notes) for report in reports) == 1


def test_what_was_forgotten_while_they_waited_is_not_encoded_for_them():
    with rag_for("llama", policy="reuse", cold="background") as rag:
        with held(rag):
            requests = [rag.submit(PROMPT, **ASKED) for _ in range(3)]
            rag.forget()
        reports = [request.result(LONG).report.link for request in requests]
        rag.flush()
        assert not [report.notes for report in reports if report.notes]
        assert not list(rag.components.store.keys())


def test_what_one_computes_exactly_is_there_for_those_that_wait_before_it_is_answered():
    shared = [Prompt([text(9, 1), chunk(40, 70), text(6, i)]) for i in range(4)]
    tree = TreeConfig(host_bytes=1 << 24)
    with rag_for("llama", policy="prefix", tree=tree) as rag:
        with held(rag):
            requests = [rag.submit(prompt, **LONG_ANSWER) for prompt in shared]
        answers = [request.result(LONG) for request in requests]
    assert [answer.report.batch for answer in answers] == [4] * 4
    assert [answer.report.link.tree_tokens for answer in answers] == [0, 49, 49, 49]
    oracle = [greedy(plain("llama"), ids(prompt), 40, eos_token_id=-1) for prompt in shared]
    assert [answer.token_ids for answer in answers] == oracle


def test_a_request_that_waits_holds_no_kv():
    def tensor_bytes():
        gc.collect()
        kept = [
            one.untyped_storage() for one in gc.get_objects() if type(one) is torch.Tensor and one.dim() > 2
        ]
        return sum({one.data_ptr(): one.nbytes() for one in kept}.values())

    with warmed("llama", PROMPT, policy="lego:4", tree=TreeConfig(host_bytes=1 << 24)) as rag:
        rag.flush()
        before = tensor_bytes()
        with held(rag):
            requests = [rag.submit(PROMPT, **ASKED) for _ in range(4)]
            assert tensor_bytes() == before > 0
        assert len({request.result(LONG).token_ids for request in requests}) == 1


def test_entries_of_waiting_requests_are_loaded_while_others_are_decoded():
    store = SlowStore()
    warmed("llama", PROMPT, policy="reuse", store=store)
    tiers = TieredStore([HostStore(1 << 30), store])
    options = {"store": tiers, "load": "always", "cold": "never", "queue": QueueConfig(max_batch=1)}
    with rag_for("llama", policy="reuse", **options) as rag:
        first = rag.submit(Prompt([text(30, 12)]), **{**ASKED, "max_new_tokens": 100})
        until(lambda: first.state == "running")
        second = rag.submit(PROMPT, **ASKED)
        until(lambda: len(store.finished) == 3)
        assert second.state == "waiting"
        assert {use.source for use in second.result(LONG).report.link.uses} == {"host"}
        assert len(first.result(LONG).token_ids) == 100
