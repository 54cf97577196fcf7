"""Models whose chunks cannot be linked: exact beginnings, and the bare model's tokens whatever is cached."""

import threading

import pytest
import torch
import transformers as tf

from ragcachekit import CancelScope, ModelNotSupported, Prompt, RagCache, StoreConfig, Text, TreeConfig
from ragcachekit.store.memory import HostStore
from ragcachekit.types import chunk_id
from snapshots_kit import FAMILIES, FOLDER, STATEFUL, Dialogues, bare, model_of, rag_of
from soak_kit import soaked

GREEDY = {"max_new_tokens": 6, "do_sample": False}
every = pytest.mark.parametrize("name", soaked(FAMILIES, "qwen3_5", "mamba2", "gpt2"))
two = pytest.mark.parametrize("name", ["qwen3_5", "gpt2"])
"""With a state and without: what an engine does around the model does not depend on more."""


def reused(answer):
    return answer.report.link.exact_tokens


@every
def test_a_repeated_beginning_is_reused_exactly(name):
    talks = Dialogues(1)
    with rag_of(name) as rag:
        assert rag.grade == "prefix"
        first, again, other = talks.prompt(0, 1), talks.prompt(0, 1), talks.prompt(0, 2)
        answers = [rag.generate(first, **GREEDY)]
        rag.flush()
        for prompt, known in (
            (again, 20 + len(talks.chunks[0] + talks.chunks[1])),
            (other, 20 + len(talks.chunks[0])),
        ):
            answers.append(rag.generate(prompt, **GREEDY))
            rag.flush()
            assert reused(answers[-1]) >= known
            assert answers[-1].report.link.approximate_tokens == 0
            assert answers[-1].token_ids == bare(name, prompt)
        assert reused(answers[0]) == 0
        assert answers[0].token_ids == bare(name, first)
        assert answers[1].report.link.grade == "prefix"
        assert rag.policy == "prefix"


@every
@pytest.mark.parametrize("rounds", [10, pytest.param(20, marks=pytest.mark.soak)])
def test_dialogues_with_evictions_restarts_and_forgets_give_the_bare_models_tokens(name, tmp_path, rounds):
    talks, hits = Dialogues(2), 0
    options = {"store": StoreConfig(host_bytes=20_000 * rounds, disk_path=tmp_path, disk_bytes=4_000_000)}
    rag = rag_of(name, **options)
    for number in range(rounds):
        prompt = talks.any()
        answer = rag.generate(prompt, **GREEDY)
        assert answer.token_ids == bare(name, prompt), f"dialogue {number}"
        hits += reused(answer) > 0
        if number % 6 == 3:
            rag.flush()
            rag.forget([chunk_id(talks.chunks[talks.draw.randrange(4)], "default")])
        elif number % 6 == 5:
            rag.close()
            rag = rag_of(name, **options)
    rag.close()
    assert hits >= rounds / 4


@every
def test_after_a_restart_the_beginning_comes_from_the_disk(name, tmp_path):
    talks = Dialogues(3)
    options = {"store": StoreConfig(disk_path=tmp_path)}
    with rag_of(name, **options) as rag:
        rag.generate(talks.prompt(0, 1), **GREEDY)
        rag.flush()  # closing keeps nothing that is not stored yet
    with rag_of(name, **options) as rag:
        prompt = talks.prompt(0, 1)
        answer = rag.generate(prompt, **GREEDY)
        assert reused(answer) >= 20 + len(talks.chunks[0] + talks.chunks[1])
        assert answer.report.link.uses[0].source == "tree:disk"
        assert answer.token_ids == bare(name, prompt)


@pytest.mark.parametrize("name", STATEFUL)
def test_what_is_stored_is_never_written_to(name):
    talks = Dialogues(4)
    with rag_of(name) as rag:
        rag.generate(talks.prompt(0, 1), **GREEDY)
        rag.flush()
        nodes = [node for top in rag.components.tree.levels.roots.values() for node in top.values()]
        every_node = [one for node in nodes for one in node.subtree()]
        kvs = [rag.components.tree.levels.use(node).kv for node in every_node]
        assert any(kv.has_state for kv in kvs)
        tensors = [t for kv in kvs for t in (*kv.keys, *kv.values, *kv.sums.values())]
        before = [t.clone() for t in tensors]
        for _ in range(3):
            assert reused(rag.generate(talks.prompt(0, 1), **GREEDY))
            rag.flush()
        assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))


@two
def test_forgotten_chunks_and_other_namespaces_are_not_reused(name):
    talks = Dialogues(5)
    with rag_of(name) as rag:
        rag.generate(talks.prompt(0, 1), **GREEDY)
        rag.flush()
        assert reused(rag.generate(talks.prompt(0, 1), namespace="other", **GREEDY)) == 0
        rag.flush()
        rag.forget([chunk_id(talks.chunks[0], "default")])
        prompt = talks.prompt(0, 1)
        answer = rag.generate(prompt, **GREEDY)
        assert reused(answer) <= 20
        assert answer.token_ids == bare(name, prompt)
        rag.flush()
        assert reused(rag.generate(talks.prompt(0, 1), namespace="other", **GREEDY)) > 20


def test_chunks_forgotten_by_id_before_the_look_up_are_not_stored():
    talks = Dialogues(10)
    with rag_of("qwen3_5") as rag:
        planner, look_up = rag.components.planner, rag.components.planner.look_up

        def forgotten_first(request):
            rag.forget([chunk_id(talks.chunks[0], "default")])
            return look_up(request)

        planner.look_up = forgotten_first
        rag.generate(talks.prompt(0), **GREEDY)
        planner.look_up = look_up
        rag.flush()
        assert reused(rag.generate(talks.prompt(0), **GREEDY)) <= 20


@two
def test_every_way_in_gives_the_same_tokens(name):
    talks = Dialogues(6)
    prompt = talks.prompt(0, 1)
    with rag_of(name) as rag:
        rag.generate(prompt, **GREEDY)
        rag.flush()
        right = bare(name, prompt)
        assert rag.generate(prompt, policy="full", **GREEDY).token_ids == right
        assert rag.submit(prompt, **GREEDY).result().token_ids == right
        assert [a.token_ids for a in rag.generate_batch([prompt, prompt], **GREEDY)] == [right, right]
        linked = rag.link(prompt)
        assert linked.report.exact_tokens > 20
        output = model_of(name).generate(**linked.inputs, **GREEDY)
        assert tuple(output[0, -6:].tolist()) == right
        assert rag.link(prompt).cache is not None
        assert rag.generate(prompt, num_beams=2, **GREEDY).report.link.exact_tokens == 0
        assert (
            rag.generate(prompt, do_sample=True, seed=3, max_new_tokens=6).token_ids
            == rag.generate(prompt, do_sample=True, seed=3, max_new_tokens=6, policy="full").token_ids
        )


@pytest.mark.parametrize("name", STATEFUL)
def test_texts_that_part_share_their_beginning_from_the_third_prompt_on(name):
    talks = Dialogues(7)
    common = talks.tokens(96)
    prompts = [Prompt([Text(token_ids=common + talks.tokens(40))]) for _ in range(3)]
    with rag_of(name) as rag:
        found = []
        for prompt in prompts:
            answer = rag.generate(prompt, **GREEDY)
            rag.flush()
            assert answer.token_ids == bare(name, prompt)
            found.append(reused(answer))
    assert found == [0, 0, 96]


def test_a_cancelled_prefill_keeps_nothing_and_the_engine_goes_on():
    talks, event = Dialogues(8), threading.Event()
    event.set()
    with rag_of("qwen3_5") as rag:
        answer = rag.submit(talks.prompt(0, 1), cancel=event, **GREEDY).result()
        assert answer.report.finish_reason == "cancelled"
        prompt = talks.prompt(0, 1)
        assert rag.generate(prompt, **GREEDY).token_ids == bare("qwen3_5", prompt)


def test_the_stores_budget_is_the_trees_and_an_own_tree_counts():
    with rag_of("gpt2", store=StoreConfig(host_bytes=123_456)) as rag:
        assert [(tier.tier, tier.budget) for tier in rag.stats()] == [("tree:host", 123_456)]
    with rag_of("gpt2", tree=TreeConfig(host_bytes=77_777)) as rag:
        assert [tier.budget for tier in rag.stats() if tier.tier == "tree:host"] == [77_777]


def test_what_of_the_store_is_for_chunks_alone_is_said(caplog):
    with rag_of("gpt2", store=StoreConfig(quotas={"*": 1 << 20}, eviction="lru")) as rag:
        assert [tier.tier for tier in rag.stats()] == ["tree:host"]
    assert "quotas, eight bits and remote tiers are for chunks" in caplog.text


def test_options_for_linked_chunks_are_warned_of_and_others_are_not(caplog):
    with rag_of("gpt2", policy="impact:0.1", encoder="system", store=HostStore(1 << 20)) as rag:
        assert rag.policy == "prefix"
    assert "policy impact:0.1 (prefix is used), encoder system, an open KVStore" in caplog.text
    caplog.clear()
    for policy in ("auto", "full", "prefix"):
        rag_of("gpt2", policy=policy, store=StoreConfig()).close()
    assert "not used" not in caplog.text


def test_shadow_mode_counts_and_compares_nothing_as_all_is_exact():
    talks = Dialogues(12)
    with rag_of("qwen3_5", shadow=1.0) as rag:
        for _ in range(2):
            rag.generate(talks.prompt(0), **GREEDY)
            rag.flush()
        report = rag.shadow_report()
        assert (report.requests, report.shadowed, report.failed) == (2, 0, 0)


@two
def test_encode_computes_the_beginning_of_a_prompt(name):
    talks = Dialogues(9)
    prompt = talks.prompt(0, 1)
    with rag_of(name) as rag:
        assert rag.encode([], prompt=prompt) == []
        assert reused(rag.generate(talks.prompt(0, 1), **GREEDY)) >= 20 + len(talks.chunks[0])
        with pytest.raises(ValueError, match="exact beginnings"):
            rag.tune([prompt])


def test_a_beginning_that_encode_computes_does_not_give_way_to_its_own_request():
    talks, paused = Dialogues(11), set()
    with rag_of("qwen3_5") as rag, CancelScope(pause=lambda: paused.add(threading.current_thread())):
        rag.encode([], prompt=talks.prompt(0))
        assert reused(rag.generate(talks.prompt(0), policy="full", **GREEDY)) == 0
        others = paused - {threading.current_thread()}
        paused.clear()
        rag.encode([], prompt=talks.prompt(1))
        assert others, "an ordinary request inside the scope does"
        assert not paused - {threading.current_thread()}


def test_encoder_decoders_are_refused_with_the_reason():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    with pytest.raises(ModelNotSupported, match="encoder-decoder"):
        RagCache(tf.T5ForConditionalGeneration(tf.T5Config(**sizes)).eval(), cache_dir=FOLDER.name)


def test_models_without_generate_are_refused_with_the_reason():
    with pytest.raises(ModelNotSupported, match="no generate"):
        RagCache(model_of("gpt2").transformer, cache_dir=FOLDER.name)
