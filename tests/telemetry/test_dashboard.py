"""The dashboard's queries against what an engine exports."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ragcachekit import CachedRetrieval, ProximityCache, RagCache, StoreConfig
from ragcachekit.telemetry import PrometheusObserver
from speaking import byte_level, speaker

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"
DASHBOARD = json.loads(files("ragcachekit.telemetry").joinpath("grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
METRIC = re.compile(r"\b(?:ragcachekit|process)_\w+")
FROM_PROMETHEUS = {"instance", "job"}


@pytest.fixture
def exported(folder, tmp_path, prompt) -> dict[str, set[str]]:
    """The labels of each sample that an engine with two tiers, shadow mode and a query cache exports."""
    tiers = StoreConfig(host_bytes=1 << 24, disk_path=tmp_path / "kv", disk_bytes=1 << 26)
    options: dict[str, Any] = {"cold": "now", "policy": "lego:4", "cache_dir": folder, "shadow": 1.0}
    with RagCache(speaker(), byte_level(), store=tiers, **options) as rag:
        metrics, cache = PrometheusObserver(rag), CachedRetrieval[str](ProximityCache(10))
        rag.add_query_cache(cache)
        for question in (1, 2, 1):
            cache.get(np.eye(64)[question], "place", lambda: [("1", "one")])
        for _ in range(2):
            rag.submit(prompt, max_new_tokens=3).result()
        rag.flush()
        text = metrics.render()[0].decode()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_every_query_names_exported_metrics_and_labels(exported) -> None:
    for title, target in TARGETS:
        query = target["expr"]
        names = METRIC.findall(query)
        assert names, title
        assert set(names) <= exported.keys(), title
        known = FROM_PROMETHEUS.union(*(exported[name] for name in names))
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
        matched = set(re.findall(r"(\w+)=~?\"", query))
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert grouped | matched | shown <= known, title
        if grouped:
            assert shown <= grouped, f"{title}: the sum has lost a label that the legend shows"


def test_the_page_lists_what_is_exported(exported) -> None:
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported if "_created" not in name}
    ours = {name for name in families if name.startswith("ragcachekit_")}
    listed = set(re.findall(r"`(ragcachekit_\w+)`", PAGE.read_text()))
    assert listed == ours
