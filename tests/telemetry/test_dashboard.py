"""The dashboard's queries against what an engine exports, as text and (soak) in a real Prometheus."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import start_http_server
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
PROMETHEUS = os.environ.get("PROMETHEUS") or shutil.which("prometheus")


class Traffic:
    """An engine with two tiers, shadow mode and a query cache, and questions to it."""

    def __init__(self, rag: RagCache, prompt: Any) -> None:
        self.rag, self.prompt, self.metrics = rag, prompt, PrometheusObserver(rag)
        self.cache = CachedRetrieval[str](ProximityCache(10))
        rag.add_query_cache(self.cache)
        self.asked = 0

    def ask(self) -> None:
        self.asked += 1
        for number in (1, self.asked + 1):
            self.cache.get(np.eye(64)[number % 64], "place", lambda: [("1", "one")])
        self.rag.submit(self.prompt, max_new_tokens=3).result()


@contextmanager
def traffic(folder: Path, store: Path, prompt: Any) -> Iterator[Traffic]:
    tiers = StoreConfig(host_bytes=1 << 24, disk_path=store, disk_bytes=1 << 26)
    options: dict[str, Any] = {"cold": "now", "policy": "lego:4", "cache_dir": folder, "shadow": 1.0}
    with RagCache(speaker(), byte_level(), store=tiers, **options) as rag:
        yield Traffic(rag, prompt)


@pytest.fixture
def exported(folder, tmp_path, prompt) -> dict[str, set[str]]:
    """The labels of each exported sample."""
    with traffic(folder, tmp_path / "kv", prompt) as made:
        made.ask()
        made.ask()
        made.rag.flush()
        text = made.metrics.render()[0].decode()
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


def test_queries_use_the_dashboard_s_variables() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    for title, target in TARGETS:
        assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables, title
        assert target["datasource"]["uid"] == "${datasource}"


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[str]:
    """A Prometheus that scrapes a local port every second; yields its address."""
    assert PROMETHEUS is not None
    config = {"global": {"scrape_interval": "1s"}}
    scrape = {"job_name": "engine", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
    (folder / "prometheus.yml").write_text(json.dumps({**config, "scrape_configs": [scrape]}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def evaluate(address: str, query: str) -> list[float]:
    query = query.replace("$__rate_interval", "30s").replace("$instance", ".*")
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        result = json.load(answer)
    assert result["status"] == "success", result
    return [float(sample["value"][1]) for sample in result["data"]["result"]]


@pytest.mark.soak
@pytest.mark.skipif(PROMETHEUS is None, reason="set PROMETHEUS to the path of a prometheus binary")
def test_every_query_has_a_value_in_a_real_prometheus(folder, tmp_path, prompt) -> None:
    with traffic(folder, tmp_path / "kv", prompt) as made:
        server, thread = start_http_server(0, "127.0.0.1", made.metrics.registry)
        ended = threading.Event()

        def ask() -> None:
            while not ended.wait(0.05):
                made.ask()

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            with prometheus(tmp_path, server.server_port) as address:
                missing = [target["expr"] for _, target in TARGETS]
                deadline = time.monotonic() + 90
                while missing and time.monotonic() < deadline:
                    time.sleep(1)
                    with suppress(urllib.error.URLError):  # not started yet
                        missing = [
                            query
                            for query in missing
                            if not (values := evaluate(address, query)) or not all(map(math.isfinite, values))
                        ]
        finally:
            ended.set()
            asking.join()
            server.shutdown()
            server.server_close()
            thread.join()
    assert missing == []
