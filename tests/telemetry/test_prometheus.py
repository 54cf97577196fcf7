"""Prometheus metrics against the reports of the same requests, read by Prometheus' own parser."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import ragcachekit
from queue_kit import held
from ragcachekit import CachedRetrieval, ProximityCache, RagCache, StoreConfig
from ragcachekit.errors import PromptTooLong
from ragcachekit.telemetry import PrometheusObserver
from speaking import byte_level, speaker

SOURCES = ("exact", "approximate", "recomputed", "computed")


def samples(metrics: PrometheusObserver) -> dict[tuple[str, ...], float]:
    """Values by the sample's name and the values of its labels."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    families = text_string_to_metric_families(body.decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_tokens_and_seconds_are_those_of_the_reports(rag, prompt) -> None:
    metrics = PrometheusObserver(rag)
    answers = [rag.generate(prompt, max_new_tokens=2) for _ in range(2)]
    answers += [rag.submit(prompt, max_new_tokens=3).result()]
    answers += rag.generate_batch([prompt, prompt], max_new_tokens=2)
    with rag.stream(prompt, max_new_tokens=2) as stream:
        answers.append(stream.answer)
    values, reports = samples(metrics), [answer.report for answer in answers]
    for source in SOURCES:
        expected = sum(getattr(report.link, f"{source}_tokens") for report in reports)
        assert values["ragcachekit_prompt_tokens_total", source] == expected, source
    assert values["ragcachekit_prompt_tokens_total", "approximate"] > 0
    assert values["ragcachekit_prompt_tokens_total", "recomputed"] > 0
    assert values["ragcachekit_output_tokens_total",] == sum(len(answer.token_ids) for answer in answers)
    assert values["ragcachekit_requests_total", "length"] == 6
    counts = {"ttft": 6, "request": 6, "link": 6, "load_wait": 6, "time_per_output_token": 6, "queue": 6}
    for name, count in counts.items():
        assert values[f"ragcachekit_{name}_seconds_count",] == count, name
    seconds = {
        "ttft": sum(report.ttft_ms for report in reports),
        "request": sum(report.total_ms for report in reports),
        "link": sum(report.link.link_ms for report in reports),
        "queue": sum(report.queue_ms for report in reports),
        "time_per_output_token": sum((r.total_ms - r.ttft_ms) / (r.output_tokens - 1) for r in reports),
    }
    for name, total in seconds.items():
        assert values[f"ragcachekit_{name}_seconds_sum",] == pytest.approx(total / 1e3), name


def test_outcomes_without_an_answer_count_no_tokens(rag, prompt) -> None:
    metrics = PrometheusObserver(rag)
    with pytest.raises(PromptTooLong):
        rag.generate("river " * 2000)
    with held(rag):
        rag.submit(prompt).cancel()
        values = samples(metrics)
        assert values["ragcachekit_requests_total", "PromptTooLong"] == 1
        assert values["ragcachekit_requests_total", "cancelled"] == 1
        request = rag.submit(prompt, max_new_tokens=1)
        assert samples(metrics)["ragcachekit_queue_requests", "waiting"] == 1
        assert ("ragcachekit_prompt_tokens_total", "computed") not in values
        assert values["ragcachekit_ttft_seconds_count",] == 0
        assert values["ragcachekit_output_tokens_total",] == 0
    request.result()


def test_the_engine_is_read_at_the_scrape(folder, tmp_path, prompt) -> None:
    store = StoreConfig(host_bytes=1 << 24, disk_path=tmp_path / "kv", disk_bytes=1 << 26)
    options = {"store": store, "cold": "now", "policy": "reuse", "cache_dir": folder, "shadow": 1.0}
    with RagCache(speaker(), byte_level(), **options) as rag:
        metrics = PrometheusObserver(rag)
        for _ in range(2):
            rag.submit(prompt, max_new_tokens=4).result()
        rag.flush()
        values, shadow = samples(metrics), rag.shadow_report()
        for tier in rag.stats():
            assert values["ragcachekit_tier_bytes", tier.tier] == tier.nbytes
            assert values["ragcachekit_tier_budget_bytes", tier.tier] == tier.budget
            assert values["ragcachekit_tier_entries", tier.tier] == tier.entries
            assert values["ragcachekit_tier_hits_total", tier.tier] == tier.hits
            assert values["ragcachekit_tier_misses_total", tier.tier] == tier.misses
            assert values["ragcachekit_tier_writable", tier.tier] == 1
        assert {tier.tier for tier in rag.stats()} == {"host", "disk"}
        assert values["ragcachekit_tier_hits_total", "host"] > 0
        encoding, queue = rag.encoding_stats(), rag.queue.stats()
        assert values["ragcachekit_chunk_tokens_total", "missed"] == encoding.missed_tokens > 0
        assert values["ragcachekit_chunk_tokens_total", "encoded"] == encoding.encoded_tokens
        assert values["ragcachekit_decode_steps_total",] == queue.steps > 0
        assert values["ragcachekit_queue_requests", "running"] == 0
        assert values["ragcachekit_shadow_agreement",] == shadow.agreement
        assert shadow.shadowed > 0
        (build,) = [set(labels) for (name, *labels) in values if name == "ragcachekit_build_info"]
        assert build == {ragcachekit.__version__, "LlamaForCausalLM", rag.fingerprint[:12], "cpu"}
        assert ("process_open_fds",) in values
    after = samples(metrics)
    assert after["ragcachekit_requests_total", "length"] == 2
    assert str(tmp_path) not in metrics.render()[0].decode()


def test_lookups(rag) -> None:
    metrics = PrometheusObserver(rag)
    cache = CachedRetrieval[str](ProximityCache(10))
    rag.add_query_cache(cache)
    for number in (1, 1, 2, 1):
        cache.get(np.arange(4.0) + number, "place", lambda: [("1", "a document")])
    values = samples(metrics)
    assert values["ragcachekit_query_cache_lookups_total", "hit"] == 2
    assert values["ragcachekit_query_cache_lookups_total", "miss"] == 2
    assert values["ragcachekit_search_seconds_count",] == 2


def test_namespaces_are_a_label_on_demand(rag, prompt) -> None:
    metrics = PrometheusObserver(rag, CollectorRegistry(), namespaces=True)
    for namespace in ("acme", "beta", "acme"):
        rag.generate(prompt, namespace=namespace, max_new_tokens=1)
    values = samples(metrics)
    assert values["ragcachekit_output_tokens_total", "acme"] == 2
    assert values["ragcachekit_output_tokens_total", "beta"] == 1
    assert values["ragcachekit_prompt_tokens_total", "acme", "approximate"] > 0
    assert values["ragcachekit_prompt_tokens_total", "beta", "approximate"] == 0
    plain = PrometheusObserver(rag)
    rag.generate(prompt, namespace="acme", max_new_tokens=1)
    assert "acme" not in plain.render()[0].decode()


def test_one_engine_per_registry(rag, prompt) -> None:
    registry = CollectorRegistry(auto_describe=True)
    first = PrometheusObserver(rag, registry)
    with pytest.raises(ValueError, match="its own CollectorRegistry"):
        PrometheusObserver(rag, registry)
    rag.generate(prompt, max_new_tokens=1)
    assert samples(first)["ragcachekit_requests_total", "length"] == 1, "the second one broke the first"
    first.close()
    first.close()
    assert samples(first) == {}
    second = PrometheusObserver(rag, registry)
    rag.generate(prompt, max_new_tokens=1)
    assert samples(second)["ragcachekit_requests_total", "length"] == 1


def test_a_registry_keeps_no_engine_alive(folder) -> None:
    rag: Any = RagCache(speaker(), byte_level(), cache_dir=folder)
    metrics, gone = PrometheusObserver(rag), weakref.ref(rag)
    registry = metrics.registry
    rag.close()
    del rag, metrics
    gc.collect()
    assert gone() is None
    assert list(registry.collect())
