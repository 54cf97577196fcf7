"""Shadow mode: a share of the answers is checked against a full prefill, and no answer hangs on it."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from engine_kit import EXACT, PROMPT, chunk, ids, rag_for, text, warmed
from families import greedy, plain
from ragcachekit import Prompt, RagCache, ShadowConfig
from ragcachekit.quality import shadow
from speaking import byte_level, speaker

ASKED = {"max_new_tokens": 8, "do_sample": False}
AFTER = ShadowConfig(1.0, when="after")
OTHERS = [Prompt([text(9, 1), chunk(33, 2), chunk(25, 3), text(6, seed)]) for seed in range(50, 58)]


def shadowed(name="llama", config=AFTER, **options):
    """An engine that has KV of PROMPT, with fresh figures."""
    rag = warmed(name, PROMPT, policy="reuse", shadow=config, **options)
    if config is not None:
        rag.shadow.reset()
    return rag


def differing(rag):
    """Prompts whose reused answer is not that of full; the tests need some."""
    full = [rag.generate(p, policy="full", **ASKED).token_ids for p in OTHERS]
    reused = [rag.generate(p, **ASKED).token_ids for p in OTHERS]
    rag.shadow.reset()
    found = [p for p, one, two in zip(OTHERS, full, reused, strict=True) if one != two]
    assert found
    return found


# -- which requests -----------------------------------------------------------------------------------


def drawn(seed, share=0.4, number=40):
    """Of so many requests, those that were drawn."""
    rag = rag_for("llama", policy="full", shadow=ShadowConfig(share, seed=seed))
    return [rag.shadow.draw({}) is not None for _ in range(number)]


def test_the_share_is_kept_and_the_seed_decides():
    assert 300 < sum(drawn(3, 0.02, 20_000)) < 500
    assert drawn(3) == drawn(3) != drawn(4)
    assert all(drawn(0, 1.0))


def test_requests_are_drawn_by_their_number():
    rag = rag_for("llama", policy="reuse", shadow=ShadowConfig(0.4, "after", seed=7))
    for _ in range(13):  # at the first nothing is cached yet
        rag.generate(PROMPT, max_new_tokens=1)
    report = rag.shadow_report()
    assert (report.requests, report.shadowed) == (13, sum(drawn(7, number=13)[1:]))
    assert report.shadowed


def test_only_approximate_reuse_is_shadowed():
    rag = shadowed()
    rag.generate(PROMPT, policy="full", **ASKED)
    rag.generate(PROMPT, policy="lego:1000", **ASKED)  # everything recomputed
    exact = warmed("llama", EXACT, policy="reuse", encoder="system", shadow=AFTER)
    exact.generate(EXACT, **ASKED)
    assert (rag.shadow_report().requests, rag.shadow_report().shadowed) == (2, 0)
    assert exact.shadow_report().shadowed == 0
    rag.generate(PROMPT, **ASKED)
    assert rag.shadow_report().shadowed == 1


# -- what is measured ---------------------------------------------------------------------------------


@torch.no_grad()
def own_kl(rag, prompt):
    """By hand: the model's own prefill, and generate over the linked prompt, in numpy."""
    full = rag.model(torch.tensor([ids(prompt)])).logits[0, -1].double().numpy()
    linked = rag.link(prompt)
    found = rag.model.generate(
        **linked.inputs, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    reused = found.logits[0][0].double().numpy()
    p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (full, reused))
    return float(np.sum(p * np.log(p / q)))


@pytest.mark.parametrize(("name", "policy"), [("llama", "reuse"), ("gemma2", "lego:4")])
def test_kl_is_that_of_an_independent_computation(name, policy):
    rag = warmed(name, PROMPT, policy=policy, shadow=AFTER)
    rag.shadow.reset()
    rag.generate(PROMPT, **ASKED)
    report = rag.shadow_report()
    want = own_kl(rag, PROMPT)
    assert report.mean_kl == report.max_kl == pytest.approx(want, rel=2e-3, abs=1e-7)
    if policy == "reuse":
        assert want > 1e-6


@pytest.mark.parametrize("when", ["after", "background"])
def test_agreement_and_f1_against_the_models_own_answers(when):
    rag = shadowed(config=ShadowConfig(1.0, when, bound=1.0))
    answers = [rag.generate(p, **ASKED).token_ids for p in OTHERS]
    assert rag.flush(60)
    own = [tuple(greedy(plain("llama"), ids(p), 8)) for p in OTHERS]
    report = rag.shadow_report()
    assert (report.shadowed, report.compared, report.failed) == (8, 8, 0)
    assert report.agreement == sum(a == b for a, b in zip(answers, own, strict=True)) / 8
    f1 = [
        2 * sum(min(a.count(t), b.count(t)) for t in set(a)) / (len(a) + len(b))
        for a, b in zip(answers, own, strict=True)
    ]
    assert report.f1 == pytest.approx(np.mean(f1))
    assert 0 < report.mean_kl <= report.max_kl
    rag.close()


def test_sampling_compares_the_first_token_only_and_draws_no_chance_of_its_own():
    silent, rag = shadowed(config=None), shadowed()
    asked = {"max_new_tokens": 6, "do_sample": True, "temperature": 0.7, "top_k": 20}
    drawn_answers = []
    for engine in (silent, rag):
        torch.manual_seed(5)
        drawn_answers.append([engine.generate(PROMPT, **asked).token_ids for _ in range(3)])
    assert drawn_answers[0] == drawn_answers[1]
    report = rag.shadow_report()
    assert (report.shadowed, report.compared, report.agreement) == (3, 0, None)
    assert report.mean_kl == pytest.approx(own_kl(rag, PROMPT), rel=2e-3)
    rag.generate(PROMPT, generation_config=transformers.GenerationConfig(max_new_tokens=3, do_sample=True))
    assert (rag.shadow_report().shadowed, rag.shadow_report().failed) == (4, 0)


def test_a_cancelled_answer_is_not_compared():
    with shadowed(config=ShadowConfig(1.0)) as rag:
        stop, given = threading.Event(), []

        def put(value):
            given.append(value)
            if len(given) == 2:  # the first token, after the prompt
                stop.set()

        streamer = SimpleNamespace(put=put, end=lambda: None)
        cut = rag.generate(PROMPT, cancel=stop, streamer=streamer, **ASKED)
        assert cut.report.finish_reason == "cancelled"
        assert 0 < len(cut.token_ids) < 8
        assert rag.flush(60)
        assert (rag.shadow_report().shadowed, rag.shadow_report().compared) == (1, 0)


def test_requests_with_code_of_their_own_are_left_alone():
    seen = []

    class Counting(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(1)
            return scores

    rag = shadowed()
    rag.generate(PROMPT, logits_processor=[Counting()], **ASKED)
    assert len(seen) == 8
    assert rag.shadow_report().shadowed == 0


def test_text_and_stop_strings(tmp_path):
    with RagCache(
        speaker(), byte_level(), policy="reuse", cold="now", shadow=AFTER, cache_dir=tmp_path
    ) as rag:
        one, two = "Berlin is the capital of Germany. The river", "Paris is the capital of France; the river"
        rag.register([one, two])
        prompt = f"Context:\n{one}\n{two}\nWhere?"
        for _ in range(2):
            answer = rag.generate(prompt, stop=["a", "e"], **ASKED)
        full = rag.generate(prompt, policy="full", stop=["a", "e"], **ASKED)
        report = rag.shadow_report()
        assert (report.shadowed, report.compared) == (1, 1)
        assert report.agreement == float(answer.text == full.text)
        assert "1 of 3 requests shadowed" in str(report)
        assert "agreement" in report._repr_html_()
        assert report.to_dict()["shadowed"] == 1


# -- when it goes wrong -------------------------------------------------------------------------------


def test_it_warns_once_when_the_bound_is_passed(caplog):
    rag = shadowed(config=ShadowConfig(1.0, "after", window=4, bound=0.5))
    (prompt, *_) = differing(rag)
    caplog.clear()
    for count in range(1, 8):
        rag.generate(prompt, **ASKED)
        assert sum(record.levelno == logging.WARNING for record in caplog.records) == (count > 2)
        assert rag.shadow_report().recent_disagreement == min(count, 4) / 4
    assert "3 of the last 3 shadowed requests" in caplog.text
    assert not rag.shadow_report().falling_back
    assert rag.generate(prompt, **ASKED).report.link.fallback is None


def test_it_falls_back_until_reset():
    rag = shadowed(config=ShadowConfig(1.0, "after", window=2, bound=0.5, fall_back=True))
    (prompt, *_) = differing(rag)
    reused = [rag.generate(prompt, **ASKED) for _ in range(2)]
    assert all(answer.report.link.fallback is None for answer in reused)
    assert rag.shadow_report().falling_back
    fallen = rag.generate(prompt, **ASKED)
    assert fallen.token_ids == tuple(greedy(plain("llama"), ids(prompt), 8))
    assert fallen.report.link.policy == "full"
    assert "shadow mode: 2 of the last 2 shadowed requests" in fallen.report.link.fallback
    assert rag.link(prompt).report.fallback == fallen.report.link.fallback
    (batch,) = rag.generate_batch([prompt], **ASKED)
    assert batch.token_ids == fallen.token_ids
    assert "falling back" in str(rag.shadow_report())
    rag.shadow.reset()
    again = rag.generate(prompt, **ASKED)
    assert again.report.link.fallback is None
    assert again.token_ids == reused[0].token_ids


def test_namespaces_do_not_share_figures_or_fall_back():
    rag = shadowed(config=ShadowConfig(1.0, "after", window=1, bound=0.0, fall_back=True))
    (prompt, *_) = differing(rag)
    for namespace in ("one", "two"):
        rag.generate(prompt, namespace=namespace, **ASKED)  # cold
    rag.generate(prompt, namespace="one", **ASKED)
    assert rag.generate(prompt, namespace="one", **ASKED).report.link.fallback
    assert rag.generate(prompt, namespace="two", **ASKED).report.link.fallback is None
    assert rag.generate(prompt, namespace="two", **ASKED).report.link.fallback
    assert rag.shadow_report("one").shadowed == rag.shadow_report("two").shadowed == 1
    assert rag.shadow_report().shadowed == 2
    rag.shadow.reset("one")
    assert not rag.shadow_report("one").falling_back
    assert rag.shadow_report("two").falling_back


# -- it never reaches an answer -----------------------------------------------------------------------


@pytest.mark.parametrize("when", ["after", "background"])
def test_errors_inside_never_surface(monkeypatch, caplog, when):
    rag = shadowed(config=ShadowConfig(1.0, when))
    want = shadowed(config=None).generate(PROMPT, **ASKED).token_ids

    def broken(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(shadow, "run_generate", broken)
    assert rag.generate(PROMPT, **ASKED).token_ids == want
    assert rag.flush(60)
    assert (rag.shadow_report().failed, rag.shadow_report().shadowed) == (1, 0)
    assert "out of memory" in caplog.text
    rag.close()


class Gate:
    """Holds the worker inside the model."""

    def __init__(self, monkeypatch):
        self.entered, self.open, self.runs = threading.Semaphore(0), threading.Event(), 0
        run_generate = shadow.run_generate

        def held(*args, **options):
            self.runs += 1
            self.entered.release()
            assert self.open.wait(60)
            return run_generate(*args, **options)

        monkeypatch.setattr(shadow, "run_generate", held)


def test_answers_do_not_wait_and_the_queue_is_bounded(monkeypatch):
    monkeypatch.setattr(shadow, "MAX_WAITING", 2)
    gate = Gate(monkeypatch)
    with shadowed(config=ShadowConfig(1.0)) as rag:
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
    gate = Gate(monkeypatch)
    rag = shadowed(config=ShadowConfig(1.0))
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
    assert not [t for t in threading.enumerate() if t.name == "ragcachekit-background"]
    rag.close()  # twice does no harm


def test_what_was_in_work_at_a_reset_is_not_counted(monkeypatch):
    gate = Gate(monkeypatch)
    with shadowed(config=ShadowConfig(1.0)) as rag:
        rag.generate(PROMPT, **ASKED)
        assert gate.entered.acquire(timeout=60)
        rag.shadow.reset()
        gate.open.set()
        assert rag.flush(60)
        assert rag.shadow_report().shadowed == 0
