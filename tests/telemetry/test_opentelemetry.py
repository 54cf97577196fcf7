"""Spans and metrics as an SDK exports them, against the reports of the same requests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from ragcachekit import CachedRetrieval, ProximityCache, RagCache, StoreConfig, agenerate, astream
from ragcachekit.errors import PromptTooLong
from ragcachekit.telemetry import OpenTelemetryObserver
from speaking import byte_level, speaker

MS = 1_000_000
QUESTION = "Where does the river flow?"
DOCUMENT = "Berlin is the capital of Germany."


class Traces:
    """A provider of its own, and what it exported."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(**options)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """The spans by name; of equal names the last."""
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def children(self, parent: ReadableSpan) -> dict[str, ReadableSpan]:
        return {
            span.name: span
            for span in self.exporter.get_finished_spans()
            if span.parent is not None and span.parent.span_id == parent.context.span_id
        }


@pytest.fixture
def traces() -> Iterator[Traces]:
    traces = Traces()
    yield traces
    traces.provider.shutdown()


def lasted(span: ReadableSpan) -> float:
    """Milliseconds."""
    return (span.end_time - span.start_time) / MS


def test_a_queued_request(rag, traces, prompt) -> None:
    rag.generate(prompt, max_new_tokens=1)
    OpenTelemetryObserver(rag, traces.provider, model="tiny")
    with traces.tracer.start_as_current_span("handler") as handler:
        report = rag.submit(prompt, max_new_tokens=3, temperature=0.5, do_sample=True).result().report
    span, link = traces.spans["text_completion tiny"], report.link
    assert span.parent.span_id == handler.get_span_context().span_id
    assert span.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "ragcachekit",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stream": False,
        "gen_ai.response.finish_reasons": (report.finish_reason,),
        "gen_ai.usage.input_tokens": link.prompt_tokens,
        "gen_ai.usage.output_tokens": report.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": link.exact_tokens + link.approximate_tokens,
        "gen_ai.usage.cache_write.input_tokens": link.written_tokens,
        "gen_ai.server.time_to_first_token": report.ttft_ms / 1e3,
        "ragcachekit.namespace": "default",
        "ragcachekit.policy": "lego:4",
        "ragcachekit.encoder": "standalone",
        "ragcachekit.chunks": 2,
        "ragcachekit.fell_back": False,
        "ragcachekit.retries": 0,
        "ragcachekit.batch": 1,
        "ragcachekit.tokens.exact": link.exact_tokens,
        "ragcachekit.tokens.approximate": link.approximate_tokens,
        "ragcachekit.tokens.recomputed": link.recomputed_tokens,
        "ragcachekit.tokens.computed": link.computed_tokens,
    }
    assert link.approximate_tokens > 0
    assert lasted(span) == pytest.approx(report.total_ms, abs=0.01)


def test_children_are_laid_end_to_end(rag, traces, prompt) -> None:
    OpenTelemetryObserver(rag, traces.provider, model="tiny")
    report = rag.submit(prompt, max_new_tokens=3).result().report
    span = traces.spans["text_completion tiny"]
    children = traces.children(span)
    assert sorted(children, key=lambda name: children[name].start_time) == [
        "queue",
        "link",
        "prefill",
        "decode",
    ]
    assert children["queue"].start_time == span.start_time
    for first, second in (("queue", "link"), ("link", "prefill"), ("prefill", "decode")):
        assert abs(children[first].end_time - children[second].start_time) <= 2
    assert abs(children["decode"].end_time - span.end_time) <= 2
    assert lasted(children["queue"]) == pytest.approx(report.queue_ms, abs=0.01)
    assert lasted(children["link"]) == pytest.approx(report.link.link_ms, abs=0.01)
    (plan,) = traces.children(children["link"]).values()
    assert plan.name == "plan"
    assert lasted(plan) == pytest.approx(report.link.plan_ms, abs=0.01)
    assert 0 < lasted(plan) <= lasted(children["link"])
    assert lasted(children["prefill"]) > 0


def test_loads_from_disk(folder, tmp_path, traces, prompt) -> None:
    store = StoreConfig(host_bytes=1 << 24, disk_path=tmp_path / "kv", disk_bytes=1 << 26)
    options: dict[str, Any] = {"cold": "now", "policy": "reuse", "cache_dir": folder, "load": "always"}
    with RagCache(speaker(), byte_level(), store=store, **options) as rag:
        rag.generate(prompt, max_new_tokens=1)
    with RagCache(speaker(), byte_level(), store=store, **options) as rag:
        OpenTelemetryObserver(rag, traces.provider)
        report = rag.generate(prompt, max_new_tokens=1).report
    spans = traces.spans
    assert spans["load"].attributes["ragcachekit.load.bytes"] == report.link.loaded_bytes > 0
    assert spans["load"].attributes["ragcachekit.load.duration"] == report.link.load_ms / 1e3
    assert spans["load"].parent.span_id == spans["link"].context.span_id
    assert spans["link"].start_time <= spans["load"].start_time
    assert spans["load"].end_time == spans["link"].end_time
    assert lasted(spans["load"]) <= report.link.wait_ms + 0.01
    assert spans["text_completion LlamaForCausalLM"].attributes["ragcachekit.tokens.approximate"] > 0


async def test_parents_across_threads_and_tasks(rag, traces, prompt) -> None:
    OpenTelemetryObserver(rag, traces.provider, model="tiny")
    parents = []
    with traces.tracer.start_as_current_span("task") as parent:
        await agenerate(rag, [{"role": "user", "content": QUESTION}], max_new_tokens=1)
        parents.append(parent)
    with traces.tracer.start_as_current_span("stream") as parent:
        async with astream(rag, prompt, max_new_tokens=2) as stream:
            assert [piece async for piece in stream]
        parents.append(parent)
    chat, streamed = traces.spans["chat tiny"], traces.spans["text_completion tiny"]
    assert [chat.parent, streamed.parent] == [parent.get_span_context() for parent in parents]
    assert streamed.attributes["gen_ai.request.stream"] is True
    first = streamed.attributes["gen_ai.response.time_to_first_chunk"]
    assert first == stream.answer.report.ttft_ms / 1e3
    assert "gen_ai.response.time_to_first_chunk" not in chat.attributes
    assert not trace.get_current_span().is_recording()


def test_errors_have_a_type_and_no_message(rag, traces) -> None:
    OpenTelemetryObserver(rag, traces.provider, model="tiny")
    with pytest.raises(PromptTooLong):
        rag.generate("river " * 2000)
    with pytest.raises(ValueError, match="max_new_tokens"):
        rag.submit(QUESTION, max_new_tokens=0)
    spans = traces.exporter.get_finished_spans()
    assert [span.attributes["error.type"] for span in spans] == ["PromptTooLong", "ValueError"]
    for span in spans:
        assert span.status.status_code is trace.StatusCode.ERROR
        assert not span.status.description
        assert not span.events


def test_retrievals(rag, traces) -> None:
    OpenTelemetryObserver(rag, traces.provider)
    cache = CachedRetrieval[str](ProximityCache(10))
    rag.add_query_cache(cache)
    with traces.tracer.start_as_current_span("handler") as handler:
        for _ in range(2):
            cache.get(np.arange(4.0) + 1, "place", lambda: [("1", DOCUMENT)], question=QUESTION)
    *spans, _ = traces.exporter.get_finished_spans()
    assert [span.name for span in spans] == ["retrieval"] * 2
    assert [span.attributes["ragcachekit.query_cache.result"] for span in spans] == ["miss", "hit"]
    assert [span.attributes["ragcachekit.retrieval.documents"] for span in spans] == [1, 1]
    assert spans[1].attributes["ragcachekit.query_cache.distance"] == 0
    assert [span.parent for span in spans] == [handler.get_span_context()] * 2
    assert all(span.end_time > span.start_time for span in spans)


def test_no_text_is_recorded(rag, traces, prompt) -> None:
    """Of prompts, stop strings, answers and errors."""
    OpenTelemetryObserver(rag, traces.provider)
    answer = rag.generate(prompt, stop="Tiber", max_new_tokens=8)
    rag.submit([{"role": "user", "content": QUESTION}], max_new_tokens=2).result()
    with pytest.raises(TypeError):
        rag.generate([{"role": "user", "content": 3}, QUESTION])  # type: ignore[list-item]
    exported = "".join(span.to_json() for span in traces.exporter.get_finished_spans())
    assert len(exported) > 1000
    for text in (*[segment.text for segment in prompt.segments], QUESTION, "Tiber", answer.text):
        assert text.strip() not in exported


# Of semantic-conventions-genai in October 2026; the package still has the names before.
USAGE = ("input_tokens", "output_tokens", "cache_read.input_tokens", "cache_write.input_tokens")
NEW = {
    "gen_ai.usage.cache_write.input_tokens",
    *(f"gen_ai.client.inference.usage.{name}" for name in USAGE),
    *(f"gen_ai.client.inference.operation.{name}" for name in USAGE[:2]),
    "gen_ai.server.time_to_first_token",  # of a metric; as an attribute by request
}


def test_names_are_those_of_the_conventions(rag, traces, prompt) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    OpenTelemetryObserver(rag, traces.provider, provider, model="tiny")
    reports = [rag.submit(prompt, max_new_tokens=2).result().report for _ in range(2)]
    with pytest.raises(PromptTooLong):
        rag.generate("river " * 2000)
    conventions = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")} | {
        error_attributes.ERROR_TYPE
    }
    known = {value for name, value in vars(gen_ai_metrics).items() if isinstance(value, str)}
    for span in traces.exporter.get_finished_spans():
        assert {name for name in span.attributes if name.startswith("gen_ai.")} <= (conventions | NEW)
    data = reader.get_metrics_data()
    found = {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert {name for name in found if name.startswith("gen_ai.")} <= known | NEW
    first = found["gen_ai.server.time_to_first_token"]
    assert first.unit == "s"
    (point,) = first.data.data_points
    assert point.sum == pytest.approx(sum(report.ttft_ms for report in reports) / 1e3)
    assert point.explicit_bounds[0] == 0.001
    durations = {
        point.attributes.get("error.type"): point.count
        for point in found["gen_ai.server.request.duration"].data.data_points
    }
    assert durations == {None: 2, "PromptTooLong": 1}
    usage = {name: found[f"gen_ai.client.inference.usage.{name}"].data.data_points[0] for name in USAGE}
    assert {point.attributes["gen_ai.token.modality"] for point in usage.values()} == {"text"}
    links = [report.link for report in reports]
    assert {name: point.value for name, point in usage.items()} == {
        "input_tokens": sum(link.prompt_tokens for link in links),
        "output_tokens": sum(report.output_tokens for report in reports),
        "cache_read.input_tokens": sum(link.reused_tokens for link in links),
        "cache_write.input_tokens": sum(link.written_tokens for link in links),
    }
    for name in USAGE[:2]:
        (sizes,) = found[f"gen_ai.client.inference.operation.{name}"].data.data_points
        assert (sizes.count, sizes.sum) == (2, usage[name].value)
    sources = {
        point.attributes["ragcachekit.source"]: point.value
        for point in found["ragcachekit.prompt.tokens"].data.data_points
    }
    assert sources["approximate"] == sum(report.link.approximate_tokens for report in reports) > 0
    provider.shutdown()


@pytest.mark.parametrize(
    ("hidden", "name", "package"),
    [
        ("prometheus_client", "PrometheusObserver", "prometheus-client"),
        ("opentelemetry", "OpenTelemetryObserver", "opentelemetry-api"),
    ],
)
def test_a_missing_package_is_named(hidden, name, package) -> None:
    code = (
        f"import sys; sys.modules['{hidden}'] = None\n"
        "import ragcachekit, ragcachekit.telemetry as telemetry\n"
        f"try: telemetry.{name}\nexcept ModuleNotFoundError as error: print(error)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert f"pip install {package} " in done.stdout, done.stdout + done.stderr


def test_importing_the_package_imports_neither() -> None:
    code = (
        "import sys, ragcachekit, ragcachekit.observers, ragcachekit.telemetry\n"
        "print(*{'prometheus_client', 'opentelemetry'} & sys.modules.keys())"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.split() == []
