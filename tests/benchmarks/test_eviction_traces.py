"""The traces have the shares that they claim, and a user's file is read or refused by line."""

from collections import Counter

import pytest

from benchmarks.eviction.traces import TRACES, TraceShape, exponent, open_trace, read_trace

SHAPE = TraceShape(documents=1000, requests=6000, mean_tokens=400)


def share_of_top(docs, count):
    counts = Counter(docs)
    return sum(n for _, n in counts.most_common(count)) / sum(counts.values())


def test_three_percent_of_documents_take_sixty_percent_of_requests():
    s = exponent(1000)
    weights = [rank**-s for rank in range(1, 1001)]
    assert sum(weights[:30]) / sum(weights) == pytest.approx(0.6, abs=1e-6)
    trace = open_trace("zipf", SHAPE, 0)
    assert share_of_top([request[0] for request in trace.requests], 30) == pytest.approx(0.6, abs=0.05)
    every = [doc for request in trace.requests for doc in request]
    assert share_of_top(every, 30) == pytest.approx(0.6, abs=0.12)


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("top_k", [1, 5])
def test_every_trace_has_its_size_and_no_document_twice_in_a_request(name, top_k):
    shape = TraceShape(documents=100, requests=240, top_k=top_k)
    trace = open_trace(name, shape, 3)
    assert trace.name == name
    assert len(trace.requests) == 240
    assert all(len(set(request)) == len(request) <= top_k for request in trace.requests)
    assert max(map(len, trace.requests)) == top_k
    assert all(0 <= doc < len(trace.tokens) for request in trace.requests for doc in request)
    assert min(trace.tokens) >= 1
    assert trace.corpus_tokens == sum(trace.tokens[:100])
    assert open_trace(name, shape, 3) == trace
    assert open_trace(name, shape, 4) != trace


def test_shifting_has_other_favourites_in_every_quarter():
    trace = open_trace("shifting", SHAPE, 0)
    tops = []
    for quarter in range(4):
        firsts = [request[0] for request in trace.requests[quarter * 1500 : (quarter + 1) * 1500]]
        tops.append({doc for doc, _ in Counter(firsts).most_common(10)})
    assert max(len(tops[a] & tops[a + 1]) for a in range(3)) <= 2
    firsts = [[r[0] for r in open_trace("zipf", SHAPE, 0).requests[h : h + 3000]] for h in (0, 3000)]
    stays = [{doc for doc, _ in Counter(half).most_common(10)} for half in firsts]
    assert len(stays[0] & stays[1]) >= 6


def test_a_scan_asks_for_a_quarter_once_in_three_runs():
    trace = open_trace("scan", SHAPE, 0)
    scanned = [min(request) >= SHAPE.documents for request in trace.requests]
    assert sum(scanned) == 1500
    assert sum(now and not before for before, now in zip([False, *scanned], scanned, strict=False)) == 3
    docs = [doc for request, scan in zip(trace.requests, scanned, strict=True) for doc in request if scan]
    assert len(set(docs)) == len(docs)


def test_impossible_shapes_and_unknown_traces_are_refused():
    with pytest.raises(ValueError, match="top_k"):
        TraceShape(documents=3, top_k=2)
    with pytest.raises(ValueError, match="known: zipf, zipf-equal, local, shifting, scan"):
        open_trace("uniform", SHAPE, 0)


def test_a_file_of_ids_and_sizes(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"docs": ["a", {"id": "b", "tokens": 70}], "question": "ignored"}\n\n{"docs": ["b", "c", 4]}\n'
        '{"docs": [{"id": "a", "tokens": 30}]}\n'
    )
    trace = read_trace(path, default_tokens=500)
    assert trace.name == "mine"
    assert trace.requests == ((0, 1), (1, 2, 3), (0,))
    assert trace.tokens == (30, 70, 500, 500)
    assert trace.corpus_tokens == 1100


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: "),
        ("[1]", 'line 2: expected {"docs"'),
        ('{"docs": []}', "line 2: give at least one document"),
        ('{"docs": [{"tokens": 4}]}', "line 2: expected"),
        ('{"docs": [{"id": "a", "tokens": 0}]}', "line 2: give at least one document"),
        ('{"docs": ["a", "a"]}', "line 2: give at least one document"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"docs": [{"id": "x", "tokens": 3}]}\n' + line + "\n")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_trace(path, 10)
    assert says in str(caught.value)
