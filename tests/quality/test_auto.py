"""``policy="auto"``: what it measures, what it chooses, and when."""

import json
import re
import shutil
import stat
import threading
import time

import pytest
import torch

from engine_kit import checked
from families import columns, plain, prefill, stepwise, tokens, wrapped
from ragcachekit import Chunk, PrecedingChunks, Prompt, RagCache, RagCacheError, Text
from ragcachekit.cancellation import ActiveRequests
from ragcachekit.engine.runner import Kept
from ragcachekit.policies.base import PolicyAndEncoder
from ragcachekit.policies.baselines import Lego, Reuse
from ragcachekit.policies.measured import Auto
from ragcachekit.policies.registry import known_policies, open_policy
from ragcachekit.prompt.segments import TokenSegment, token_count
from ragcachekit.quality import check
from ragcachekit.quality.check import (
    DEFAULT,
    MAX_PROMPTS,
    CheckPrompt,
    Measured,
    candidates,
    choice,
    contenders,
)
from speaking import byte_level, speaker

TEXTS = [f"The river number {n} flows in the town of {n * 7}. Its capital is {n * 13}." for n in range(8)]
SYSTEM = "Answer from the context.\n"
ONE = {"max_new_tokens": 1, "do_sample": False}
RESOLVED = f"auto -> {DEFAULT}"


def prompt(number: int, system: str = SYSTEM) -> Prompt:
    chunks = [Chunk(TEXTS[number % 8]), Text("\n"), Chunk(TEXTS[(number + 1) % 8])]
    return Prompt([Text(system), *chunks, Text(f"\nWhere does the river flow? {number}")])


@pytest.fixture
def make(tmp_path):
    opened = []

    def make(**options):
        options = {"cold": "now", "cache_dir": checked(tmp_path), **options}
        opened.append(RagCache(speaker(), byte_level(), **options))
        return opened[-1]

    yield make
    for rag in opened:
        rag.close()


def auto_of(rag):
    return rag.components.auto


def records(folder):
    return sorted((folder / "auto").glob("*.json")) if (folder / "auto").is_dir() else []


def kl(full, other):
    return float(torch.nn.functional.kl_div(other, full, log_target=True, reduction="sum"))


def oracle(segments, encoder, first):
    """KL per token with nothing but transformers: each row alone, over columns as they were encoded.

    ``first`` tokens of every chunk that is not exact are computed.
    """
    model, (system, one, between, two, question) = plain("llama"), [s.token_ids for s in segments]
    ids = [*system, *one, *between, *two, *question]
    answer, full = [], []
    while len(answer) < check.ANSWER_TOKENS and 2 not in answer:
        full.append(prefill(model, [*ids, *answer]).logits[-1].double().log_softmax(-1))
        answer.append(int(full[-1].argmax()))
    kept = columns(prefill(model, [*system, *one]), range(len(system)), 0)
    behind = system if encoder == "system" else ()
    second = len(system + one + between)
    for chunk, at, exact in ((one, len(system), encoder == "system"), (two, second, False)):
        # Attention sees differences of positions alone: the context moves along with the chunk.
        begin = at - len(behind)
        run = prefill(model, [*behind, *chunk], range(begin, at + len(chunk)))
        left = 0 if exact else first
        kept |= columns(run, range(len(behind) + left, len(behind + chunk)), at + left)
    logits = stepwise(model, [*ids, *answer[:-1]], kept).logits[-len(answer) :]
    reused = logits.double().log_softmax(-1)
    return sum(map(kl, full, reused)) / len(answer)


@pytest.mark.parametrize("encoder", ["system", "standalone"])
@pytest.mark.parametrize(("policy", "first"), [(Reuse(), 0), (Lego(3), 3)])
def test_kl_is_that_of_transformers(encoder, policy, first, tmp_path):
    sizes = enumerate([9, 21, 2, 17, 6], start=1)
    segments = tuple(TokenSegment(tokens(count, seed), seed in (2, 4)) for seed, count in sizes)
    with RagCache(wrapped("llama"), cache_dir=checked(tmp_path), encoder=encoder) as rag:
        pair = PolicyAndEncoder(policy.name, encoder)
        results, _ = auto_of(rag).check.run([CheckPrompt(segments)], {pair: policy}, "space")
    expected = oracle(segments, encoder, first)
    assert expected > 1e-3, "the oracle can tell reuse from full"
    (found,) = results[pair]
    assert found.kl == pytest.approx(expected, rel=1e-3)
    cached = 9 + 21 + 17
    recomputed = first * (1 if encoder == "system" else 2)
    assert found.ratio == pytest.approx(recomputed / cached)


A, B = PolicyAndEncoder("impact:0.1", "system"), PolicyAndEncoder("deep:0.1", "system")
C = PolicyAndEncoder("lego:16", "standalone")


def results(**kls):
    """Per pair KLs by prompt; the ratio, also its seconds, comes first."""
    named = {"a": A, "b": B, "c": C}
    return {
        named[name]: [Measured(kl, ratio, ratio) for kl in values] for name, (ratio, *values) in kls.items()
    }


def test_the_least_kl_wins():
    assert choice(results(a=(0.1, 1, 1, 1, 1), b=(0.1, 0.6, 0.61, 0.59, 0.6))) == B


def test_of_two_within_the_noise_the_cheaper_wins():
    assert choice(results(a=(0.05, 0.1, 3.0, 0.1, 1.2), b=(0.1, 1, 1, 1, 1))) == A
    assert choice(results(a=(0.05, 1.2, 1.3, 1.2, 1.3), b=(0.1, 1, 1, 1, 1))) == B


def timed(kl, ms):
    return [Measured(kl, 0.1, ms / 1e3)] * 4


def test_the_quickest_within_the_bound_wins():
    found = {A: timed(1.0, 90), B: timed(1.3, 50), C: timed(1.7, 10)}
    assert choice(found) == A
    assert choice(found, 1.4) == B
    assert choice(found, 1.8) == C


def test_of_two_as_quick_ones_the_cheaper_encoder_wins():
    mean = PolicyAndEncoder("reuse", "average:2")
    assert choice({A: timed(1.05, 100), mean: timed(1.0, 95)}) == A
    assert choice({A: timed(1.05, 100), mean: timed(1.0, 80)}) == mean


def test_clearly_worse_candidates_leave_after_three_prompts():
    assert set(contenders(results(a=(0.1, 1, 1), b=(0.1, 3, 3)))) == {A, B}
    assert contenders(results(a=(0.1, 1, 1, 1), b=(0.1, 2.1, 2, 2))) == [A]
    assert contenders(results(a=(0.1, 1, 1, 1), b=(0.1, 0.5))) == [A], "one that left does not return"


def test_candidates_that_recompute_too_much_are_not_chosen():
    assert choice(results(a=(0.1, 1, 1), c=(0.16, 0, 0))) == A
    assert choice(results(c=(0.16, 0, 0))) == C, "unless there is nothing else"


def test_it_is_the_default_and_begins_with_the_default_pair(make):
    rag = make()
    assert rag.policy == RESOLVED
    rag.generate(prompt(0), **ONE)
    report = rag.generate(prompt(0), **ONE).report.link
    assert (report.policy, report.encoder) == (RESOLVED, DEFAULT.encoder)
    assert report.chunks[0].exact, "behind the system text"
    assert report.approximate_tokens > 0
    assert rag.link(prompt(0)).report.policy == RESOLVED
    assert rag.generate_batch([prompt(0)] * 2, **ONE)[1].report.link.policy == RESOLVED


def test_a_choice_is_used_and_kept_for_the_next_process(make, tmp_path, caplog):
    rag = make()
    found = rag.tune(prompts=map(prompt, range(4)))
    assert {row.pair for row in found.rows} == set(candidates(None, False))
    assert found.pair in {row.pair for row in found.rows}
    label = f"auto -> {found.policy} on {found.encoder}"
    assert rag.policy == label
    (path,) = records(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = make()
    assert other.policy == label
    assert other.generate(prompt(0), **ONE).report.link.encoder == found.encoder
    assert make(namespace="else").policy == RESOLVED
    assert make(encoder="sinks:2").policy == "auto -> sensitive:0.1 on sinks:2"
    assert caplog.records == []
    assert "chosen" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["policy"] == found.policy


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder with the record of a choice."""
    folder = tmp_path_factory.mktemp("tuned")
    with RagCache(speaker(), byte_level(), cold="now", cache_dir=folder) as rag:
        rag.tune(prompts=[prompt(0)])
    return folder


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: b"[" * 100_000,
        lambda record: json.dumps(record | {"fingerprint": "0" * 64}),
        lambda record: json.dumps(record | {"policy": "full"}),
        lambda record: json.dumps(record | {"system": ["a"]}),
        lambda record: json.dumps(record | {"rows": record["rows"][1:]}),
        lambda record: json.dumps({**record, "more": 1}),
    ],
)
def test_damaged_and_foreign_records_are_ignored(make, tuned, tmp_path, caplog, damage):
    shutil.copytree(tuned, tmp_path, dirs_exist_ok=True)
    (path,) = records(tmp_path)
    damaged = damage(json.loads(path.read_text()))
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    rag = make()
    assert rag.policy == RESOLVED
    assert "is not used" in caplog.text
    rag.generate(prompt(0), **ONE)


def test_with_neighbours_the_chunk_before_is_tried(make):
    rag = make(neighbours=PrecedingChunks([TEXTS]))
    assert rag.policy == "auto -> sensitive:0.1 on similar:1"
    found = rag.tune(prompts=[prompt(0), prompt(3)])
    assert ("reuse", "similar:1") in {row.pair for row in found.rows}


@pytest.mark.parametrize(
    ("options", "asked", "message"),
    [
        ({}, {}, "needs prompts with two chunks"),
        ({}, {"prompts": ["no chunk here"]}, "needs prompts with two chunks"),
        ({"encoder": "in-prompt"}, {"prompts": [prompt(0)]}, "in-prompt"),
    ],
)
def test_what_cannot_be_measured(make, options, asked, message):
    with pytest.raises(ValueError, match=message):
        make(**options).tune(**asked)


def test_texts_that_change_with_the_prompts(make):
    """Means serve after other texts than their own; when these always change, none is computed again."""
    rag, sources = make(), []
    for number in range(2 * MAX_PROMPTS):
        asked = prompt(number, f"It is {number} o'clock. {SYSTEM}")
        report = rag.generate(asked, **ONE).report.link
        rag.flush()
        assert (report.encoder, report.notes) == ("average:2", ())
        sources.append([use.source for use in report.chunks])
    assert sources[0] == ["computed"] * 2
    assert sources[9:] == [["host"] * 2] * (2 * MAX_PROMPTS - 9), "more than half of the window is new"
    stored = rag.stats()[0].entries
    rag.generate(prompt(0, f"Now. {SYSTEM}"), **ONE)
    rag.flush()
    assert rag.stats()[0].entries == stored + 1, "the text before the chunks alone"


def test_chunks_encoded_before_any_prompt_are_reused_and_computed_in_a_prompt_later(make):
    rag = make()
    rag.encode(TEXTS)
    joined = [part for text in TEXTS[:4] for part in (Chunk(text), Text("\n"))]
    asked = Prompt([Text(SYSTEM), *joined, Text("Where does the river flow?")])
    links = []
    for _ in range(2):
        links.append(rag.generate(asked, **ONE).report.link)
        rag.flush()
    first, second = links
    assert first.encoder == "average:2"
    assert {use.source for link in links for use in link.chunks} == {"host"}
    assert not any(use.exact for use in first.chunks)
    assert [use.exact for use in second.chunks] == [True, False, False, False]
    rag.encode(TEXTS, system=SYSTEM)
    report = rag.generate(prompt(1), **ONE).report.link
    assert [use.source for use in report.chunks] == ["host"] * 2
    assert report.notes == ()


def test_a_chunk_encoded_before_any_prompt_without_companions_is_reused(make):
    rag = make()
    rag.encode(TEXTS[1:2])
    rag.encode(TEXTS[1:2])
    assert rag.encoding_stats().encoded_tokens == rag.count_tokens(TEXTS[1])
    report = rag.generate(prompt(0), **ONE).report.link
    assert [use.source for use in report.chunks] == ["computed", "host"]


def test_a_prompt_that_shows_nothing_is_refused(make):
    rag = make()
    with pytest.raises(ValueError, match=r"prompt= has no chunk: no chunk registered .* occurs verbatim"):
        rag.encode(TEXTS, prompt=f"{SYSTEM}and no text of these")
    with pytest.raises(ValueError, match="system= or prompt=, not both"):
        rag.encode(TEXTS, prompt=prompt(0), system=SYSTEM)


def test_a_later_process_encodes_behind_the_recorded_text(make, monkeypatch):
    monkeypatch.setattr("ragcachekit.quality.auto.choice", lambda results, bound: B)
    make().tune(prompts=[prompt(0)])
    rag = make()
    rag.encode(TEXTS)
    report = rag.generate(prompt(0), **ONE).report.link
    assert report.policy == "auto -> deep:0.1 on system"
    assert [use.source for use in report.chunks] == ["host"] * 2


def test_forgetting_a_namespace_drops_its_record(make, tmp_path):
    rag = make()
    rag.tune(prompts=[prompt(0)])
    rag.forget()
    assert records(tmp_path) == []
    assert rag.policy == RESOLVED
    rag.generate(prompt(0), **ONE)
    rag.forget(texts=[TEXTS[0]])
    assert auto_of(rag).seen("default") == ()


class Clock:
    """Seconds that pass with every look."""

    def __init__(self, step):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


def test_the_budget_of_time(make):
    rag = make()
    whole = rag.tune(prompts=map(prompt, range(6)))
    auto_of(rag).check.clock = Clock(0.25)
    cut = rag.tune(prompts=map(prompt, range(6)))
    most = max(row.prompts for row in cut.rows)
    assert 0 < most < max(row.prompts for row in whole.rows) == 6
    auto_of(rag).check.clock = Clock(30.0)
    with pytest.raises(RagCacheError, match="it measured 0 prompts"):
        rag.tune(prompts=[prompt(0)])
    assert rag.policy == f"auto -> {cut.policy} on {cut.encoder}", "the last choice stays"


def test_waiting_for_requests_is_not_counted(make, monkeypatch):
    rag, clock = make(), Clock(0.0)
    monkeypatch.setattr(auto_of(rag).check, "clock", clock)

    def wait():
        clock.now += 1000

    policies = {DEFAULT: open_policy(DEFAULT.policy)}
    segments = [TokenSegment(ids, ids[0] > 3) for ids in ((1, 2), (4, 5, 6), (5, 6, 7), (2, 3))]
    found, seconds = auto_of(rag).check.run([CheckPrompt(tuple(segments))], policies, "space", wait=wait)
    assert (len(found[DEFAULT]), seconds) == (1, 0.0)


def test_a_namespace_is_checked_behind_its_requests_once(make, tmp_path, monkeypatch):
    monkeypatch.setattr("ragcachekit.quality.auto.MAX_PROMPTS", 3)
    monkeypatch.setattr("ragcachekit.quality.auto.CHECK_PREFILLS", 0)
    rag = make(cold="background")
    for number in range(2):
        rag.generate(prompt(number), **ONE)
        rag.generate(prompt(number), **ONE)
    assert rag.flush(60)
    assert records(tmp_path) == [], "two different prompts so far"
    rag.generate(prompt(2), **ONE)
    assert rag.flush(120)
    (path,) = records(tmp_path)
    label = rag.policy
    found = json.loads(path.read_text())
    assert label == f"auto -> {found['policy']} on {found['encoder']}"
    path.unlink()
    rag.generate(prompt(3), **ONE)
    assert rag.flush(60)
    assert records(tmp_path) == [], "once"


def test_no_check_before_reuse_has_saved_its_time(make, tmp_path, monkeypatch):
    monkeypatch.setattr("ragcachekit.quality.auto.MAX_PROMPTS", 2)
    monkeypatch.setattr("ragcachekit.quality.auto.CHECK_PREFILLS", 1e9)
    monkeypatch.setattr("ragcachekit.quality.auto.MAX_SECONDS", 1e9)
    rag = make(cold="background")
    for number in (0, 1, 2, 0, 1, 2):
        rag.generate(prompt(number), **ONE)
    assert rag.flush(60)
    assert records(tmp_path) == []
    monkeypatch.setattr("ragcachekit.quality.auto.CHECK_PREFILLS", 0)
    rag.generate(prompt(0), **ONE)
    assert rag.flush(120)
    assert len(records(tmp_path)) == 1


def test_it_waits_while_a_request_runs_and_close_ends_it(make, tmp_path, monkeypatch):
    monkeypatch.setattr("ragcachekit.quality.auto.MAX_PROMPTS", 1)
    monkeypatch.setattr("ragcachekit.quality.auto.CHECK_PREFILLS", 0)
    waiting = threading.Event()
    wait = ActiveRequests.wait_for_none

    def waits(self, closed):
        waiting.set()
        wait(self, closed)

    monkeypatch.setattr(ActiveRequests, "wait_for_none", waits)
    rag = make(cold="background")
    with rag.components.active:
        rag.generate(prompt(0), **ONE)
        assert waiting.wait(60)
        assert not rag.components.background.flush(0.3)
        begun = time.monotonic()
        rag.close()
        assert time.monotonic() - begun < 5
    assert records(tmp_path) == []


def test_its_errors_do_not_reach_an_answer(make, monkeypatch, caplog):
    monkeypatch.setattr("ragcachekit.quality.auto.MAX_PROMPTS", 1)
    monkeypatch.setattr("ragcachekit.quality.auto.CHECK_PREFILLS", 0)
    rag = make(cold="background")

    def fail(*_, **__):
        raise RuntimeError("no more memory")

    monkeypatch.setattr(auto_of(rag).check, "run", fail)
    assert rag.generate(prompt(0), **ONE).token_ids
    assert rag.flush(60)
    assert "no more memory" in caplog.text
    assert rag.policy == RESOLVED


def test_a_record_that_cannot_be_written_serves_this_process(make, monkeypatch, caplog):
    def fail(*_):
        raise OSError("read-only")

    monkeypatch.setattr("ragcachekit.quality.auto.write_record", fail)
    rag = make()
    found = rag.tune(prompts=[prompt(0)])
    assert "could not be stored" in caplog.text
    assert rag.policy == f"auto -> {found.policy} on {found.encoder}"


def test_auto_is_a_policy_by_name():
    assert open_policy("auto") == Auto()
    assert open_policy("auto:1.5") == Auto(1.5)
    assert Auto(1.5).name == "auto:1.5"
    assert "auto" in known_policies()
    with pytest.raises(RagCacheError, match="give it to RagCache"):
        Auto().select([])


@pytest.mark.parametrize("name", ["auto:0.9", "auto:inf", "auto:much", "auto:"])
def test_a_bound_that_makes_no_sense_is_refused(name):
    with pytest.raises(ValueError, match=re.escape(name)):
        open_policy(name)


def test_the_bound_is_a_setting_of_the_engine(make):
    rag = make(policy="auto:1.5")
    assert rag.policy == RESOLVED
    rag.generate(prompt(0), policy="auto", **ONE)
    with pytest.raises(ValueError, match="auto:2"):
        rag.generate(prompt(0), policy="auto:2", **ONE)


def test_seen_prompts_are_bounded(make, monkeypatch):
    rag = make()
    seen, asked = auto_of(rag).seen, {"a": (0, 1, 0), "b": (2, 3)}
    for namespace, numbers in asked.items():
        for number in numbers:
            rag.generate(prompt(number), namespace=namespace, **ONE)
    rag.generate(Prompt([Text(SYSTEM), Chunk(TEXTS[0]), Text("Where?")]), namespace="a", **ONE)
    assert (len(seen("a")), len(seen("b"))) == (2, 2), "different ones of two chunks"
    monkeypatch.setattr(
        "ragcachekit.quality.auto.MAX_TOKENS", sum(token_count(one.segments) for one in seen("b"))
    )
    rag.generate(prompt(3), namespace="b", **ONE)
    assert (len(seen("a")), len(seen("b"))) == (0, 2), "those of the namespace that was idle go"


def test_a_prompt_that_ends_during_a_forget_is_not_kept(make):
    rag = make()
    drop = rag.chunks.drop

    def answered_meanwhile(*asked):
        rag.generate(prompt(0), **ONE)
        return drop(*asked)

    rag.after_answer.encode_missing = lambda *_: None  # waits for the forget
    rag.after_answer.keep = lambda _: Kept()
    rag.chunks.drop = answered_meanwhile
    rag.forget(texts=[TEXTS[0]])
    assert auto_of(rag).seen("default") == ()
