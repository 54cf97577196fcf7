"""Quality budgets: the policy's name, the stored record, and what a budget stands for."""

import json
import logging
import os
from dataclasses import replace

import pytest

from engine_kit import PROMPT, rag_for
from ragcachekit import RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.policies.measured import Budget
from ragcachekit.policies.registry import known_policies, open_policy
from ragcachekit.quality.records import (
    Budgets,
    Calibration,
    CurvePoint,
    calibration_path,
    read_calibration,
    write_record,
)

ASKED = {"max_new_tokens": 6, "do_sample": False}
CURVE = (
    CurvePoint("reuse", 0.0, 0.28, 0.31, 8),
    CurvePoint("lego:4", 0.1, 0.03, 0.045, 400),
    CurvePoint("query:0.2", 0.2, 0.001, 0.008, 400),
    CurvePoint("lego:32", 0.5, 0.0, 0.006, 400),
    CurvePoint("full", 1.0, 0.0, 0.0, 400),
)


def record(**changes):
    given = {
        "fingerprint": "f" * 64,
        "namespace": "acme/docs",
        "encoder": "standalone",
        "budget": 0.01,
        "quality": "kl",
        "curve": CURVE,
        "n": 400,
        "sample": "questions",
        "seed": 0,
        "versions": {"ragcachekit": "0.1.0"},
        "date": "2026-01-01T00:00:00+00:00",
    }
    return Calibration(**{**given, **changes})


def stored(folder, **changes):
    """A record in the folder; its path."""
    one = record(**changes)
    path = calibration_path(folder, one.fingerprint, one.namespace)
    write_record(path, one)
    return path


def test_a_budget_is_a_policy_by_name():
    assert open_policy("budget:0.01") == Budget(0.01)
    assert open_policy("budget:0.025").name == "budget:0.025"
    assert "budget:0.05" in known_policies()


def test_a_budget_that_was_not_resolved_says_so():
    with pytest.raises(RagCacheError, match=r"budget:0\.01 stands for a calibrated policy"):
        Budget(0.01).select([])


def test_the_cheapest_whose_upper_bound_is_within():
    for curve in (CURVE, CURVE[::-1]):
        found = [record(curve=curve).cheapest(loss).policy for loss in (0.31, 0.3, 0.044, 0.007, 0.005)]
        assert found == ["reuse", "lego:4", "query:0.2", "lego:32", "full"]


def test_a_record_comes_back_as_it_was(tmp_path, caplog):
    path = stored(tmp_path)
    assert read_calibration(tmp_path, "f" * 64, "acme/docs") == record()
    assert path == calibration_path(tmp_path, "f" * 64, "acme/docs")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert json.loads(path.read_text())["schema"] == 4
    assert caplog.records == []


def test_models_and_namespaces_have_their_own(tmp_path):
    stored(tmp_path)
    stored(tmp_path, namespace="other", n=7)
    stored(tmp_path, fingerprint="e" * 64, n=8)
    stored(tmp_path, n=9)  # in place of the first
    found = [("f", "acme/docs"), ("f", "other"), ("e", "acme/docs")]
    assert [read_calibration(tmp_path, f * 64, namespace).n for f, namespace in found] == [9, 7, 8]
    assert read_calibration(tmp_path, "e" * 64, "other") is None


def test_a_write_that_fails_leaves_the_old_record_and_no_litter(tmp_path, monkeypatch):
    path = stored(tmp_path)

    def full_disk(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        stored(tmp_path, n=9)
    assert read_calibration(tmp_path, "f" * 64, "acme/docs").n == 400
    assert list(path.parent.iterdir()) == [path]


def changed(**values):
    return lambda found: {**found, **values}


def point(**values):
    return lambda found: {**found, "curve": [{**found["curve"][0], **values}, *found["curve"][1:]]}


DAMAGE = {
    "the old rule": changed(schema=2),
    "no object": lambda found: [found],
    "missing": lambda found: {k: v for k, v in found.items() if k != "encoder"},
    "curve of numbers": changed(curve=[1, 2]),
    "point": point(upper="0.1"),
    "no full": lambda found: {**found, "curve": found["curve"][:-1]},
    "a policy of another version in the curve": point(policy="future:3"),
    "a policy of another encoder in the curve": point(policy="lego0"),
    "another model": changed(fingerprint="0" * 64),
    "another namespace": changed(namespace="evil"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_foreign_or_damaged_record_counts_as_none(tmp_path, caplog, how):
    path = stored(tmp_path)
    path.write_text(json.dumps(DAMAGE[how](json.loads(path.read_text()))))
    assert read_calibration(tmp_path, "f" * 64, "acme/docs") is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "is not used" in caplog.text


def test_a_record_that_others_can_write_is_not_used(tmp_path, caplog):
    stored(tmp_path).chmod(0o620)
    assert read_calibration(tmp_path, "f" * 64, "acme/docs") is None
    assert "written by others" in caplog.text


@pytest.mark.parametrize(
    ("name", "encoder", "namespace", "why"),
    [
        ("budget:0.01", "standalone", "elsewhere", "not calibrated for this model and namespace 'elsewhere'"),
        ("budget:0.01", "system", "acme/docs", "for the encoder standalone, and this one is system"),
        ("budget:0.001", "standalone", "acme/docs", "no candidate calibrated on 400 questions"),
    ],
)
def test_full_and_one_warning_where_nothing_is_sure(tmp_path, caplog, name, encoder, namespace, why):
    stored(tmp_path)
    found = Budgets(tmp_path, "f" * 64, encoder)
    for _ in range(3):
        chosen = found.resolve(open_policy(name), namespace)
        assert (chosen.policy.name, chosen.label) == ("full", f"{name} -> full")
        assert why in chosen.notes[0]
    (logged,) = caplog.records
    assert logged.levelno == logging.WARNING
    assert why in caplog.text
    assert "ragcachekit calibrate" in caplog.text


@pytest.fixture
def engine(tmp_path):
    """An engine over the folder, whose records are about its own model."""
    model = rag_for("llama").model
    made = []

    def make(**options):
        rag = RagCache(
            model,
            cold="now",
            cache_dir=tmp_path,
            **{"policy": "budget:0.01", "encoder": "standalone", **options},
        )
        made.append(rag)
        return rag

    def store(**changes):
        stored(tmp_path, fingerprint=made[0].fingerprint, namespace="default", **changes)

    make(policy="reuse")
    make.store = store
    yield make
    for rag in made:
        rag.close()


def asked(rag, **options):
    rag.generate(PROMPT, max_new_tokens=1, **options)
    return rag.generate(PROMPT, **ASKED, **options)


@pytest.mark.parametrize("policy", ["lego:4", "cacheblend:0.3"])
def test_the_engine_answers_with_the_calibrated_policy(engine, caplog, policy):
    engine.store(curve=(CurvePoint(policy, 0.1, 0.0, 0.005, 400), CURVE[-1]))
    rag = engine()
    answer, own = asked(rag), asked(rag, policy=policy)
    assert answer.token_ids == own.token_ids
    assert answer.report.link.policy == f"budget:0.01 -> {policy}"
    times = {"load_ms": 0, "link_ms": 0, "plan_ms": 0}
    assert replace(answer.report.link, policy=policy, **times) == replace(own.report.link, **times)
    assert answer.report.link.approximate_tokens > 0
    assert rag.policy == f"budget:0.01 -> {policy}"
    batch = rag.generate_batch([PROMPT, PROMPT], **ASKED)
    assert [one.token_ids for one in batch] == [own.token_ids] * 2
    assert rag.link(PROMPT).report.policy == f"budget:0.01 -> {policy}"
    assert caplog.records == []


def test_each_call_and_each_namespace_has_its_own(engine):
    engine.store()
    rag = engine(policy="full")
    asked(rag, policy="reuse")
    policies = [rag.link(PROMPT, policy=f"budget:{x}").report.policy for x in (0.01, 0.1, 0.002)]
    assert policies == ["budget:0.01 -> query:0.2", "budget:0.1 -> lego:4", "budget:0.002 -> full"]
    assert rag.link(PROMPT, policy="budget:0.01", namespace="b").report.policy == "budget:0.01 -> full"
    with pytest.raises(ValueError, match="budget"):
        rag.link(PROMPT, policy="budget:2")
