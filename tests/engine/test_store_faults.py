"""A store of the user's own that raises, hangs and lies: every way in gives the bare model's own answer."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from langchain_ragcachekit import RagCacheLLM as LangChainLLM
from llama_index_ragcachekit import RagCacheLLM as LlamaIndexLLM
from queue_kit import LONG, until
from ragcachekit import Chunk, LoadConfig, Prompt, RagCache, Text, TreeConfig, agenerate
from ragcachekit.errors import StoreError
from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.server import ServerConfig, create_app
from ragcachekit.store.base import Found, KVStore, StoreStats, concerns
from ragcachekit.store.entry import decode_entry, encode_entry
from server_kit import engine
from soak_kit import soaked
from speaking import ONE, TWO, byte_level, speaker

SYSTEM = "Answer from the context, please.\n\n"
PROMPT, OTHER = (f"{SYSTEM}{chunk}\n\nWhere does the river flow?" for chunk in (ONE, TWO))
"""With the encoder ``system`` all that is cached of them is exact."""
ASKED = {"max_new_tokens": 12, "do_sample": False}
SHORT = 0.1


class Mine(KVStore):
    """A dict, as on the page about own stores. ``act(method)`` comes first; ``lie`` makes what is found."""

    def __init__(self) -> None:
        self.entries: dict[Any, ChunkKV] = {}
        self.calls, self.released = Counter[str](), threading.Event()
        self.act: Callable[[str], object] = lambda method: None
        self.lie: Callable[[Any, dict[Any, ChunkKV]], Any] = lambda key, entries: entries[key]

    def hang(self, method: str) -> None:
        if method != "in_memory":  # which may not block
            self.released.wait(LONG)

    def did(self, method: str) -> None:
        self.calls[method] += 1
        self.act(method)

    def get(self, key, weight=1.0):
        self.did("get")
        found = self.lie(key, self.entries) if key in self.entries else None
        return Found(found, "mine") if isinstance(found, ChunkKV) else found

    def put(self, key, kv):
        self.did("put")
        self.entries[key] = kv
        return True

    def __contains__(self, key):
        self.did("contains")
        return key in self.entries

    def in_memory(self, key):
        self.did("in_memory")
        return key in self.entries

    def keys(self, *, in_memory=False):
        self.did("keys")
        return list(self.entries)

    def discard(self, key, *, damaged=True):
        self.did("discard")
        self.entries.pop(key, None)

    def forget(self, namespace, chunk_ids=None):
        self.did("forget")
        gone = [key for key in self.entries if concerns(key, namespace, chunk_ids)]
        return len([self.entries.pop(key) for key in gone])

    def stats(self):
        self.did("stats")
        return (StoreStats("mine", len(self.entries), 0, 1 << 30, 0, 0, 0, 0, 0),)


@pytest.fixture
def mine():
    yield (store := Mine())
    store.released.set()


def opened(store: KVStore, deadline: float = LONG, **options: Any) -> RagCache:
    return engine(store=store, encoder="system", load=LoadConfig("always", deadline), **options)


def warmed(store: KVStore, expected: str, deadline: float = LONG) -> RagCache:
    """An engine over a store that another one has filled."""
    with opened(store) as rag:
        rag.encode([ONE, TWO], system=SYSTEM)
        link = rag.generate(PROMPT, **ASKED).report.link
        assert (link.exact_tokens > 10, link.approximate_tokens) == (True, 0)
        assert rag.generate(PROMPT, **ASKED).text == expected
    (rag := opened(store, deadline)).register([ONE, TWO])
    return rag


def linked(rag: RagCache) -> str:
    given = rag.link(PROMPT).inputs
    ids = rag.model.generate(**given, **ASKED)[0, given["input_ids"].shape[1] :]
    return rag.tokenizer.decode(ids, skip_special_tokens=True)


def served(rag: RagCache) -> str:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    with TestClient(create_app(rag, ServerConfig("m"))) as client:
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]


WAYS: dict[str, Callable[[RagCache], str]] = {
    "generate": lambda rag: rag.generate(PROMPT, **ASKED).text,
    "stream": lambda rag: "".join(rag.stream(PROMPT, **ASKED)),
    "submit": lambda rag: rag.submit(PROMPT, **ASKED).result(LONG).text,
    "generate_batch": lambda rag: rag.generate_batch([OTHER, PROMPT], **ASKED)[1].text,
    "agenerate": lambda rag: asyncio.run(agenerate(rag, PROMPT, **ASKED)).text,
    "link": linked,
    "LangChain": lambda rag: LangChainLLM(rag=rag, max_tokens=12).invoke(PROMPT),
    "LlamaIndex": lambda rag: (
        LlamaIndexLLM(rag=rag, is_chat_model=False, max_tokens=12).complete(PROMPT).text
    ),
    "server": served,
}


@pytest.fixture(scope="module")
def expected() -> str:
    ids = torch.tensor([byte_level()(PROMPT).input_ids])
    out = speaker().generate(ids, attention_mask=torch.ones_like(ids), **ASKED)
    return byte_level().decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def failing(method: str) -> None:
    raise OSError(5, "Input/output error")


def nan(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, torch.nan)


def of_another(key, entries):
    """The entry of another key, cut to as many tokens."""
    other = next(kv for one, kv in entries.items() if one.chunk_id != key.chunk_id)
    return replace(other.each(lambda t: t[:, : entries[key].tokens].clone()), start=entries[key].start)


FAULTS = "raises", "hangs", "has NaN", "mixes keys up"


@pytest.mark.parametrize(
    ("way", "fault"),
    soaked(
        product(WAYS, FAULTS), *((way, "raises") for way in WAYS), *(("generate", fault) for fault in FAULTS)
    ),
)
def test_every_way_in(way, fault, mine, expected):
    with warmed(mine, expected, SHORT if fault == "hangs" else LONG) as rag:
        mine.act = {"raises": failing, "hangs": mine.hang}.get(fault, mine.act)
        wrong = {"has NaN": lambda key, entries: entries[key].each(nan), "mixes keys up": of_another}
        mine.lie = wrong.get(fault, mine.lie)
        assert WAYS[way](rag) == expected
        links = [report.link for report in rag.reports]
        assert (way == "link") == (not links)
        assert all(link.reused_tokens == 0 and "mine" in str(link.notes).lower() for link in links)
        assert {link.retries for link in links} <= {int(fault == "has NaN")}
        assert (rag.stats()[0].failures > 0) == (fault != "has NaN")


FIVE = [ONE, TWO, ONE.upper(), TWO.upper(), ONE[::-1]]


@pytest.mark.parametrize("hangs", ["get put", "put"])
def test_a_request_waits_for_one_deadline_in_all(hangs, mine):
    """The third look-up hangs, and whatever comes after it; of ``put`` there is nothing to look up."""
    hung = Counter[str]()

    def act(method: str) -> None:
        if method in hangs.split() and (method != "get" or mine.calls["get"] > 2):
            hung[method] += 1
            mine.hang(method)

    prompt = Prompt([Text(SYSTEM), *map(Chunk, FIVE), Text("\n\nWhere does the river flow?")])
    with opened(mine, 2 * SHORT) as rag:
        if hangs != "put":
            rag.encode(FIVE, system=SYSTEM)
        expected = rag.generate(prompt, policy="full", **ASKED).text
        mine.calls.clear()
        mine.act = act
        answer = rag.generate(prompt, **ASKED)
        assert (hung["get"], hung["put"]) == ((0, 1) if hangs == "put" else (1, 0))
        assert answer.report.link.wait_ms < 3.5e3 * SHORT  # look-ups and layers together
        assert hangs == "get put" or answer.text == expected


def altered(key, entries):
    """An entry of a store of bytes, as the page about own stores has it, with another bit."""
    raw = bytearray(b"".join(encode_entry(key, entries[key])))
    raw[-9] ^= 1
    return decode_entry(bytes(raw), key)


LIES = {
    "altered": altered,
    "half precision": lambda key, entries: entries[key].each(torch.Tensor.half),
    "cut short": lambda key, entries: entries[key].each(lambda tensor: tensor[:, 1:].clone()),
    "no KV": lambda key, entries: "nonsense",
    "Found of no KV": lambda key, entries: Found(None, "mine"),
    "no memory": lambda key, entries: entries[key].to("meta"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_its_entry_is_computed(lie, mine, expected):
    with warmed(mine, expected) as rag:
        mine.lie = LIES[lie]
        assert [rag.generate(PROMPT, **ASKED).text, linked(rag)] == [expected] * 2
        assert ("the linked prompt failed" in str(rag.reports[-1])) == (lie == "no memory")


@pytest.mark.parametrize("times", [1, 10**6])
@pytest.mark.parametrize("method", ["get", "put", "contains", "in_memory", "keys", "discard", "stats"])
def test_whatever_raises_from_the_start(method, times, mine, expected):
    mine.act = lambda called: failing(called) if called == method and mine.calls[method] <= times else None
    with opened(mine) as rag:
        rag.encode([ONE, TWO], system=SYSTEM)
        for lie in (mine.lie, LIES["half precision"]):  # which is discarded
            mine.lie = lie
            answers = rag.generate_batch([PROMPT, OTHER, PROMPT], **ASKED)
            assert [answers[0].text, answers[2].text] == [expected] * 2
        rag.forget(texts=[ONE])
        rag.stats()
    assert mine.calls[method]


def test_of_a_batch_the_rest_is_linked(mine, expected):
    with warmed(mine, expected) as rag:
        third = mine.calls["get"] + 3
        mine.act = lambda called: failing(called) if called == "get" and mine.calls["get"] == third else None
        answers = rag.generate_batch([PROMPT, OTHER, PROMPT, OTHER], **ASKED)
        assert [answer.text for answer in answers[::2]] == [expected] * 2
        assert all(answer.report.link.reused_tokens for answer in answers)
        assert sum("Input/output error" in str(answer.report) for answer in answers) == 1


def test_a_forget_that_may_leave_something_is_an_error_and_hides_that(mine, expected):
    """All others have forgotten."""
    with opened(mine, SHORT, cold="now", tree=TreeConfig()) as rag:
        mine.act = lambda method: mine.hang(method) if method == "put" else None
        rag.encode([ONE], system=SYSTEM)
        with pytest.raises(StoreError, match="forget again: StoreError: a put of it has not ended"):
            rag.forget(texts=[ONE])
        mine.released.set()
        until(lambda: mine.entries)
        assert rag.generate(PROMPT, **ASKED).report.link.reused_tokens == 0
        assert rag.stats()[-1].entries
        mine.act = lambda method: failing(method) if method == "forget" else None
        with pytest.raises(StoreError, match="forget again: OSError"):
            rag.forget(texts=[ONE])
        assert not rag.stats()[-1].entries
        mine.act = lambda method: None
        assert rag.forget(texts=[ONE]) == 1
        assert not [key for key in mine.entries if key.encoding != "prefix"]


def test_a_tree_whose_gpu_is_lost_goes_on_on_the_host(mine, expected):
    tree = KnowledgeTree(gpu_bytes=1 << 26, host_bytes=1 << 26, device="meta")  # it keeps no numbers
    with opened(mine, tree=tree, policy="prefix") as rag:
        answers = [rag.generate(PROMPT, **ASKED) for _ in range(4)]
        assert [answer.text for answer in answers] == [expected] * 4
        links = [answer.report.link for answer in answers]
        assert [link.retries for link in links] == [0, 1, 0, 0]
        assert "the linked prompt failed" in str(links[1].fallback)
        assert links[3].uses[0].source == "tree:host"
        assert [one.failures for one in rag.stats() if one.tier == "tree:gpu"] == [1]
    tree.close()
