"""Shadow mode: a share of the prompts is checked against a full prefill, and no answer hangs on it."""

import logging
import threading

import numpy as np
import pytest
import torch

from engine_kit import EXACT, PROMPT, chunk, ids, rag_for, text, warmed
from families import greedy, plain
from ragcachekit import Prompt, ShadowConfig
from ragcachekit.quality import shadow

ASKED = {"max_new_tokens": 8, "do_sample": False}
ALL = ShadowConfig(1.0, bound=1.0)
OTHERS = [Prompt([text(9, 1), chunk(33, 2), chunk(25, 3), text(6, seed)]) for seed in range(50, 58)]


def shadowed(name="llama", config=ALL, **options):
    """An engine that has KV of PROMPT, with fresh figures."""
    rag = warmed(name, PROMPT, policy="reuse", shadow=config, **options)
    rag.shadow.reset()
    return rag


def report_after(rag, *prompts, namespace=None, **options):
    """The report once these prompts were answered, and all that was drawn is compared."""
    for prompt in prompts:
        rag.generate(prompt, namespace=namespace, **ASKED, **options)
    assert rag.flush(60)
    return rag.shadow_report(namespace)


@torch.no_grad()
def by_hand(rag, prompt, policy=None):
    """KL per token and agreement on full's own greedy answer, from logits in numpy."""
    rows = [*ids(prompt), *greedy(plain("llama"), ids(prompt), 8)[:-1]]
    start = len(ids(prompt)) - 1
    full = rag.model(torch.tensor([rows])).logits[0, start:].double().numpy()
    linked, reused = rag.link(prompt, policy=policy), []
    cache = linked.inputs["past_key_values"]
    for at in range(start, len(rows)):
        here = {"position_ids": torch.tensor([[at]]), "past_key_values": cache, "use_cache": True}
        reused.append(rag.model(torch.tensor([[rows[at]]]), **here).logits[0, -1].double().numpy())
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (full, np.array(reused)))
    p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
    same = p.argmax(-1) == q.argmax(-1)
    return float((p * np.log(p / q)).sum(-1).mean()), float(same.mean())


def drawn(rag, number=20):
    """Which of so many requests are compared."""
    counts = [0]
    for _ in range(number):
        rag.generate(PROMPT, max_new_tokens=1)
        assert rag.flush(60)
        counts.append(rag.shadow_report().shadowed)
    return list(np.diff(counts))


def test_the_share_is_kept_and_the_seed_decides():
    made = [shadowed(config=ShadowConfig(0.4, seed=seed)) for seed in (3, 3, 4)]
    for rag in made[:2]:
        rag.generate(PROMPT, max_new_tokens=1)
    one, same, other = map(drawn, made)
    assert one == same != other
    assert 4 < sum(one) < 12
    assert made[0].shadow_report().requests == 21


def test_without_a_share_there_is_no_shadow_mode():
    for nothing in (None, 0.0):
        rag = rag_for("llama", shadow=nothing)
        assert rag.shadow is None
        assert rag.shadow_report().requests == 0


def test_only_approximate_reuse_is_shadowed():
    rag = shadowed()
    report_after(rag, PROMPT, policy="full")
    report_after(rag, PROMPT, policy="lego:1000")  # everything recomputed
    exact = warmed("llama", EXACT, policy="reuse", encoder="system", shadow=ALL)
    assert report_after(exact, EXACT).shadowed == 0
    assert (rag.shadow_report().requests, rag.shadow_report().shadowed) == (2, 0)
    assert report_after(rag, PROMPT).shadowed == 1


@pytest.mark.parametrize("policy", ["reuse", "lego:4"])
def test_figures_are_those_of_an_independent_computation(policy):
    rag = shadowed()
    report = report_after(rag, *OTHERS, policy=policy)
    kls, agreements = zip(*(by_hand(rag, prompt, policy) for prompt in OTHERS), strict=True)
    assert (report.requests, report.shadowed, report.failed) == (8, 8, 0)
    assert report.mean_kl == pytest.approx(np.mean(kls), rel=2e-3, abs=1e-7)
    assert report.max_kl == pytest.approx(max(kls), rel=2e-3, abs=1e-7)
    assert report.agreement == pytest.approx(np.mean(agreements))
    assert report.recent_disagreement == sum(one < 1 for one in agreements) / 50
    assert report.mean_kl > 1e-6


def test_it_draws_no_chance_of_its_own_from_sampled_answers():
    silent, rag = warmed("llama", PROMPT, policy="reuse"), shadowed()
    asked = {"max_new_tokens": 6, "do_sample": True, "temperature": 0.7, "top_k": 20}
    answers = []
    for engine in (silent, rag):
        torch.manual_seed(5)
        answers.append([engine.generate(PROMPT, **asked).token_ids for _ in range(3)])
        assert engine.flush(60)
    assert answers[0] == answers[1]
    assert rag.shadow_report().shadowed == 3


def differing(rag):
    """A prompt with a token that reuse changes; the tests need one."""
    return next(prompt for prompt in OTHERS if by_hand(rag, prompt)[1] < 1)


def test_it_warns_once_when_the_bound_is_passed(caplog):
    rag = shadowed(config=ShadowConfig(1.0, window=4, bound=0.5))
    prompt = differing(rag)
    for count in range(1, 8):
        report = report_after(rag, prompt)
        assert sum(record.levelno == logging.WARNING for record in caplog.records) == (count > 2)
        assert report.recent_disagreement == min(count, 4) / 4
    assert "3 of the last 3 shadowed prompts" in caplog.text
    assert not rag.shadow_report().falling_back
    assert rag.generate(prompt, **ASKED).report.link.fallback is None


def test_it_falls_back_until_reset():
    rag = shadowed(config=ShadowConfig(1.0, window=2, bound=0.5, fall_back=True))
    prompt = differing(rag)
    for _ in range(2):
        assert not rag.shadow_report().falling_back
        report = report_after(rag, prompt)
    assert report.falling_back
    fallen = rag.generate(prompt, **ASKED)
    assert fallen.token_ids == tuple(greedy(plain("llama"), ids(prompt), 8))
    assert fallen.report.link.policy == "full"
    assert "shadow mode: 2 of the last 2 shadowed prompts" in fallen.report.link.fallback
    assert rag.link(prompt).report.fallback == fallen.report.link.fallback
    assert "falling back" in str(rag.shadow_report())
    rag.shadow.reset()
    assert rag.generate(prompt, **ASKED).report.link.fallback is None


def test_namespaces_do_not_share_figures_or_fall_back():
    rag = shadowed(config=ShadowConfig(1.0, window=1, bound=0.0, fall_back=True))
    prompt = differing(rag)
    for namespace in ("one", "two"):
        report_after(rag, prompt, namespace=namespace)  # cold
    assert report_after(rag, prompt, namespace="one").falling_back
    assert rag.generate(prompt, namespace="one", **ASKED).report.link.fallback
    assert not rag.shadow_report("two").falling_back
    assert rag.generate(prompt, namespace="two", **ASKED).report.link.fallback is None
    assert rag.flush(60)
    assert rag.shadow_report().shadowed == 2
    rag.shadow.reset("one")
    assert not rag.shadow_report("one").falling_back
    assert rag.shadow_report("two").falling_back


def test_errors_inside_never_surface(monkeypatch, caplog):
    rag = shadowed()
    want = warmed("llama", PROMPT, policy="reuse").generate(PROMPT, **ASKED).token_ids

    def broken(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(shadow, "full_answer", broken)
    assert rag.generate(PROMPT, **ASKED).token_ids == want
    assert rag.flush(60)
    assert (rag.shadow_report().failed, rag.shadow_report().shadowed) == (1, 0)
    assert "out of memory" in caplog.text


class Gate:
    """Holds the worker inside the model."""

    def __init__(self, monkeypatch):
        self.entered, self.open, self.runs = threading.Semaphore(0), threading.Event(), 0
        full_answer = shadow.full_answer

        def held(*args, **options):
            self.runs += 1
            self.entered.release()
            assert self.open.wait(60)
            return full_answer(*args, **options)

        monkeypatch.setattr(shadow, "full_answer", held)


def test_answers_do_not_wait_and_the_queue_is_bounded(monkeypatch):
    monkeypatch.setattr(shadow, "MAX_WAITING", 2)
    gate = Gate(monkeypatch)
    with shadowed() as rag:
        rag.generate(PROMPT, **ASKED)
        assert gate.entered.acquire(timeout=60)
        for _ in range(4):
            rag.generate(PROMPT, **ASKED)  # returns while the worker is held
        report = rag.shadow_report()
        assert (report.shadowed, report.waiting, report.dropped) == (0, 2, 2)
        assert not rag.flush(0)
        gate.open.set()
        assert rag.flush(60)
        assert (rag.shadow_report().shadowed, gate.runs) == (3, 3)


def test_close_ends_the_one_in_work_and_drops_the_rest(monkeypatch):
    others = set(threading.enumerate())  # idle ones of earlier tests' engines
    gate = Gate(monkeypatch)
    rag = shadowed()
    for _ in range(3):
        rag.generate(PROMPT, **ASKED)
    assert gate.entered.acquire(timeout=60)
    closing = threading.Thread(target=rag.close)
    closing.start()
    assert rag.components.background.closed.wait(60)
    gate.open.set()
    closing.join(60)
    assert not closing.is_alive()
    assert gate.runs == 1
    assert (rag.shadow_report().shadowed, rag.shadow_report().dropped) == (0, 1)
    assert not [t for t in threading.enumerate() if t not in others and t.name == "ragcachekit-background"]


@pytest.mark.parametrize("way", ["reset", "forget"])
def test_what_was_in_work_at_a_reset_is_not_counted_nor_what_was_forgotten_before(monkeypatch, way):
    gate = Gate(monkeypatch)
    with shadowed() as rag:
        for _ in range(2):
            rag.generate(PROMPT, **ASKED)
        assert gate.entered.acquire(timeout=60)
        getattr(rag.shadow if way == "reset" else rag, way)()
        gate.open.set()
        assert rag.flush(60)
        assert (rag.shadow_report().shadowed, gate.runs) == {"reset": (0, 2), "forget": (1, 1)}[way]
