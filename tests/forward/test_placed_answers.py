"""Whole answers by way of kernels and streams are those of the CPU path."""

from __future__ import annotations

import weakref

import pytest
import torch

from engine_kit import PROMPT, chunk, ids, rag_for, text, warmed
from families import greedy, plain
from loading_kit import SlowStore, Spoil
from placing_kit import entry
from ragcachekit import Prompt
from ragcachekit.forward import linker
from ragcachekit.store.entry import EntryDamaged
from ragcachekit.store.memory import GpuStore, HostStore
from ragcachekit.types import KVKey
from simulated import Simulated

ASKED = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def by_kernel(monkeypatch):
    """Requests go the way of a GPU: through a device whose copies are as late as they may be."""
    devices = []

    def streams(_):
        devices.append(Simulated("last moment", at_once=True))
        return devices[-1]

    monkeypatch.setattr(linker, "uses_triton", lambda device: True)
    monkeypatch.setattr(linker, "streams_of", streams)
    yield devices
    assert devices
    assert all(device.faults == [] for device in devices)


CASES = [
    ("llama", "reuse"),
    ("gemma3", "lego:4"),
    ("gpt-oss", "query:0.2"),
    ("glm4", "cacheblend:0.3"),
    ("smollm3", "deep:0.2"),
    ("phi3-longrope", "lego:4"),
]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_answers_are_those_of_the_cpu_path(name, policy, by_kernel, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(linker, "uses_triton", lambda device: False)
        expected = warmed(name, PROMPT, policy=policy).generate(PROMPT, **ASKED)
    store = HostStore(1 << 28)
    with warmed(name, PROMPT, policy=policy, store=store) as rag:
        answer = rag.generate(PROMPT, **ASKED)
        linked = rag.link(PROMPT)
        output = rag.model.generate(**linked.inputs, **ASKED, pad_token_id=0)
    assert answer.token_ids == expected.token_ids
    assert tuple(output[0, len(ids(PROMPT)) :].tolist()) == expected.token_ids
    assert answer.report.link.recomputed_tokens == expected.report.link.recomputed_tokens
    assert by_kernel[0].copied > 0
    assert answer.report.link.link_ms > 0


@pytest.mark.parametrize(("name", "policy"), [("llama", "lego:4"), ("gemma3", "reuse")])
def test_answers_with_triton_kernels_are_those_of_the_cpu_path(name, policy, monkeypatch):
    store = HostStore(1 << 28)
    rag = warmed(name, PROMPT, policy=policy, store=store)
    expected = rag.generate(PROMPT, **ASKED)
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")
    answer = rag.generate(PROMPT, **ASKED)
    assert answer.token_ids == expected.token_ids


@pytest.mark.parametrize("policy", ["reuse", "lego:4"])
def test_a_batch_of_answers_is_that_of_the_cpu_path(policy, by_kernel, monkeypatch):
    other = Prompt([text(9, 1), chunk(21, 7), chunk(33, 2), text(4, 8)])
    store = HostStore(1 << 28)
    for one in (PROMPT, other):
        warmed("llama", one, policy=policy, store=store)
    rag = rag_for("llama", policy=policy, store=store)
    answers = rag.generate_batch([PROMPT, other], **ASKED)
    monkeypatch.setattr(linker, "uses_triton", lambda device: False)
    expected = rag.generate_batch([PROMPT, other], **ASKED)
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("policy", ["lego:1000", "query:0.2"])
def test_a_layer_that_does_not_come_is_computed(policy, layer, by_kernel):
    store = SlowStore()
    warmed("llama", PROMPT, policy=policy, store=store)
    keys: list[KVKey] = list(store.inner._entries)
    spoil = Spoil(layer, EntryDamaged("flipped"), lambda key: key == keys[1])
    store.before_read = spoil
    with rag_for("llama", policy=policy, store=store, load="always", cold="never") as rag:
        answer = rag.generate(PROMPT, **ASKED)
    assert spoil.spoiled
    assert [use.source for use in answer.report.link.uses].count("computed") == 1
    (note,) = answer.report.link.notes
    assert "flipped" in note
    if policy == "lego:1000":  # everything is recomputed: exact whatever fails
        assert answer.token_ids == greedy(plain("llama"), ids(PROMPT), 6)


@pytest.mark.parametrize(
    ("store", "known"), [(GpuStore(1 << 20, "cpu"), "planes"), (HostStore(1 << 20), "shapes")]
)
def test_memory_tiers_ask_tensors_once_for_what_every_request_needs(store, known):
    turned = entry(6, 0).each(lambda t: t.transpose(0, 1).contiguous().transpose(0, 1))
    key, _ = _another()
    assert store.put(key, turned)
    found = store.get(key).kv
    assert known in vars(found)
    assert found.planes.formats[0].heads == 2
    assert all(map(torch.equal, found.planes.tensors[::2], turned.keys))
    assert found.shapes[3] == ((torch.float32, (2, 6, 16)),) * 2


def test_what_a_tier_lent_comes_back(by_kernel):
    store = HostStore(1 << 28)
    rag = warmed("llama", PROMPT, policy="lego:4", store=store)
    lent = [weakref.ref(store.get(key).kv) for key in list(store._entries)]
    answer = rag.generate(PROMPT, **ASKED)
    del answer
    assert by_kernel[0].copied > 0
    store.put(*_another())
    assert [view() for view in lent if view() is not None] == []
    assert not store._lent


def _another():
    return KVKey("other", "space", "chunk", "standalone", ()), entry(3, 0)
