"""A store of the user's own that raises, hangs and lies: every way in gives the bare model's own answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from langchain_ragcachekit import RagCacheLLM as LangChainLLM
from llama_index_ragcachekit import RagCacheLLM as LlamaIndexLLM
from queue_kit import LONG
from ragcachekit import LoadConfig, RagCache, agenerate
from ragcachekit.errors import StoreError
from ragcachekit.model.kv import ChunkKV
from ragcachekit.server import ServerConfig, create_app
from ragcachekit.store.base import Found, KVStore, LayerSource, StoreStats, concerns
from server_kit import engine
from speaking import ONE, TWO, byte_level, speaker

SYSTEM = "Answer from the context, please.\n\n"
PROMPT = f"{SYSTEM}{ONE}\n\nWhere does the river flow?"
"""With the encoder ``system`` all that is cached of it is exact."""
OTHER = f"{SYSTEM}{TWO}\n\nWhere does the river flow?"
NEW = 12
ASKED = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1}


def wait_for_ever(_: object) -> None:
    RELEASED.wait(LONG)


RELEASED = threading.Event()


class Mine(KVStore):
    """A dict, as on the page about own stores. ``act(method)`` comes first; ``lie`` changes what is found."""

    def __init__(self) -> None:
        self.entries: dict[Any, ChunkKV] = {}
        self.act: Callable[[str], object] = lambda method: None
        self.lie: Callable[[Any, dict[Any, ChunkKV]], Any] = lambda key, entries: entries[key]

    def get(self, key, weight=1.0):
        self.act("get")
        found = self.lie(key, self.entries) if key in self.entries else None
        return Found(found, "mine") if isinstance(found, ChunkKV) else found

    def put(self, key, kv):
        self.act("put")
        self.entries[key] = kv
        return True

    def __contains__(self, key):
        self.act("contains")
        return key in self.entries

    def in_memory(self, key):
        if self.act is not wait_for_ever:  # it may not block
            self.act("in_memory")
        return key in self.entries

    def keys(self, *, in_memory=False):
        self.act("keys")
        return list(self.entries)

    def discard(self, key, *, damaged=True):
        self.act("discard")
        self.entries.pop(key, None)

    def forget(self, namespace, chunk_ids=None):
        self.act("forget")
        gone = [key for key in self.entries if concerns(key, namespace, chunk_ids)]
        return len([self.entries.pop(key) for key in gone])

    def stats(self):
        self.act("stats")
        return (StoreStats("mine", len(self.entries), 0, 1 << 30, 0, 0, 0, 0, 0),)

    def close(self):
        self.act("close")


def opened(store: KVStore, deadline: float = LONG, **options: Any) -> RagCache:
    return engine(store=store, encoder="system", load=LoadConfig(deadline=deadline), **options)


@pytest.fixture
def mine():
    yield (store := Mine())
    store.act = lambda method: None
    RELEASED.set()
    RELEASED.clear()


def warm(rag: RagCache, expected: str) -> None:
    rag.encode([ONE, TWO], system=SYSTEM)
    answer = rag.generate(PROMPT, **ASKED)
    assert answer.text == expected
    assert answer.report.link.reused_tokens > 10
    assert answer.report.link.approximate_tokens == 0


def failing(method: str) -> None:
    raise OSError(5, "Input/output error")


def nan(key, entries):
    return entries[key].each(lambda tensor: torch.full_like(tensor, torch.nan))


def of_another(key, entries):
    """The entry of another chunk, cut to the same tokens."""
    other = next(kv for one, kv in entries.items() if one.chunk_id != key.chunk_id)
    tokens = entries[key].tokens
    return replace(other.each(lambda tensor: tensor[:, :tokens].clone()), start=entries[key].start)


def text(rag: RagCache, ids: Any) -> str:
    return rag.tokenizer.decode(list(ids), skip_special_tokens=True)


def linked(rag: RagCache) -> str:
    given = rag.link(PROMPT).inputs
    return text(rag, rag.model.generate(**given, **ASKED)[0, given["input_ids"].shape[1] :].tolist())


def served(rag: RagCache) -> str:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    with TestClient(create_app(rag, ServerConfig("m"))) as client:
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]


FRAMEWORK = {"max_tokens": NEW}
WAYS: dict[str, Callable[[RagCache], str]] = {
    "generate": lambda rag: rag.generate(PROMPT, **ASKED).text,
    "stream": lambda rag: "".join(rag.stream(PROMPT, **ASKED)),
    "submit": lambda rag: rag.submit(PROMPT, **ASKED).result(LONG).text,
    "generate_batch": lambda rag: rag.generate_batch([OTHER, PROMPT], **ASKED)[1].text,
    "agenerate": lambda rag: asyncio.run(agenerate(rag, PROMPT, **ASKED)).text,
    "link": linked,
    "LangChain": lambda rag: LangChainLLM(rag=rag, **FRAMEWORK).invoke(PROMPT),
    "LlamaIndex": lambda rag: LlamaIndexLLM(rag=rag, is_chat_model=False, **FRAMEWORK).complete(PROMPT).text,
    "server": served,
}


@pytest.fixture(scope="module")
def expected() -> str:
    ids = torch.tensor([byte_level()(PROMPT).input_ids])
    out = speaker().generate(ids, attention_mask=torch.ones_like(ids), **ASKED)
    return byte_level().decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", ["raises", "hangs", "has NaN", "mixes keys up"])
def test_every_way_in(way, fault, mine, expected):
    with opened(mine, deadline=0.05 if fault == "hangs" else LONG) as rag:
        warm(rag, expected)
        mine.act = {"raises": failing, "hangs": wait_for_ever}.get(fault, mine.act)
        mine.lie = {"has NaN": nan, "mixes keys up": of_another}.get(fault, mine.lie)
        assert WAYS[way](rag) == expected
        reports = [report.link for report in rag.reports[1:]]
        assert all(link.reused_tokens == 0 and "mine" in str(link.notes).lower() for link in reports)
        assert (way == "link") == (not reports)
        assert [link.retries for link in reports[-1:]] in ([], [int(fault == "has NaN")])
        if fault != "has NaN":
            assert rag.stats()[0].failures > 0


METHODS = ["get", "put", "contains", "in_memory", "keys", "discard", "stats"]


@pytest.mark.parametrize("times", [1, 10**6])
@pytest.mark.parametrize("method", METHODS)
def test_whatever_raises_from_the_start(method, times, mine, expected):
    left = [times]

    def act(called):
        if called == method and left[0]:
            left[0] -= 1
            raise RuntimeError(method)

    mine.act = act
    with opened(mine) as rag:
        rag.encode([ONE, TWO], system=SYSTEM)
        assert [rag.generate(PROMPT, **ASKED).text for _ in range(3)] == [expected] * 3
        assert rag.forget(texts=[ONE]) >= 0
        rag.stats()
    assert left[0] < times


LIES = {
    "half precision": lambda key, entries: entries[key].each(torch.Tensor.half),
    "cut short": lambda key, entries: entries[key].each(lambda tensor: tensor[:, 1:].clone()),
    "fewer layers": lambda key, entries: replace(
        entries[key], keys=entries[key].keys[:1], values=entries[key].values[:1]
    ),
    "a position": lambda key, entries: replace(entries[key], start=5),
    "no KV": lambda key, entries: "nonsense",
    "Found of no KV": lambda key, entries: Found(None, "mine"),
    "no memory": lambda key, entries: entries[key].to("meta"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_its_entry_is_computed(lie, mine, expected):
    with opened(mine) as rag:
        warm(rag, expected)
        mine.lie = LIES[lie]
        assert [rag.generate(PROMPT, **ASKED).text, linked(rag)] == [expected] * 2
        mine.lie = lambda key, entries: entries[key]
        warm(rag, expected)


class Layered(Mine):
    """Gives its entries layer by layer; ``act("layer")`` comes before each, ``spoil`` changes it."""

    spoil: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda tensor: tensor)  # type: ignore[assignment]

    def open(self, key, weight=1.0):
        if (kv := self.entries.get(key)) is None:
            return None

        def layer(number):
            self.act("layer")
            return self.spoil(kv.keys[number]), self.spoil(kv.values[number])

        calls = layer, lambda whole: self.act("finished"), lambda: self.act("close")
        return LayerSource("mine", kv.nbytes, kv.shapes, *calls, kv.start, kv.sums)


@pytest.mark.parametrize("way", ["generate", "link", "generate_batch"])
@pytest.mark.parametrize("fault", ["layer raises", "layer hangs", "close hangs", "cut short", "has NaN"])
def test_layers_that_come_late_or_wrong(fault, way, expected):
    mine = Layered()
    with opened(mine, deadline=0.2) as rag:
        warm(rag, expected)
        what, _, how = fault.partition(" ")
        act = {"raises": failing, "hangs": wait_for_ever}.get(how)
        if act is not None:
            mine.act = lambda method: act(method) if method == what else None
        mine.spoil = {
            "cut short": lambda tensor: tensor[:, 1:],
            "has NaN": lambda tensor: torch.full_like(tensor, torch.nan),
        }.get(fault, mine.spoil)
        assert WAYS[way](rag) == expected
        mine.act = lambda method: None
        RELEASED.set()
        RELEASED.clear()


def test_of_a_batch_the_rest_is_linked(mine, expected):
    gets = []

    def act(method):
        gets.append(method) if method == "get" else None
        if gets.count("get") == 3:
            gets.append("failed")
            raise ConnectionError("reset by peer")

    with opened(mine) as rag:
        warm(rag, expected)
        mine.act = act
        answers = rag.generate_batch([PROMPT, OTHER, PROMPT, OTHER], **ASKED)
        assert [answer.text for answer in answers[::2]] == [expected] * 2
        failed = [answer.report.link for answer in answers if answer.report.link.notes]
        assert len(failed) == 1
        assert "reset by peer" in failed[0].notes[0]
        assert all(answer.report.link.reused_tokens for answer in answers)


def test_a_late_put_does_not_bring_back_what_was_forgotten(mine, expected):
    hang = threading.Event()
    with opened(mine, deadline=0.05) as rag:
        mine.act = lambda method: hang.wait(LONG) if method == "put" else None
        rag.encode([ONE], system=SYSTEM)
        assert not mine.entries
        mine.act = lambda method: None
        rag.forget(texts=[ONE])
        hang.set()
        while mine.entries or rag.stats()[0].failures == 0:
            pass
        assert rag.generate(PROMPT, **ASKED).text == expected


def test_a_forget_that_fails_is_an_error_and_hides_its_entries(mine, expected):
    with opened(mine) as rag:
        warm(rag, expected)
        mine.act = lambda method: failing(method) if method == "forget" else None
        with pytest.raises(StoreError, match="forget again"):
            rag.forget(texts=[ONE])
        assert rag.generate(PROMPT, **ASKED).report.link.reused_tokens < 18
        mine.act = lambda method: None
        assert rag.forget(texts=[ONE]) > 0
