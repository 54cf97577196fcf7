"""The knowledge tree under real (tiny) models: what comes out is what an ordinary prefill gives."""

from typing import Any

import pytest
import torch

from engine_kit import bare, chunk, ids, rag_for, text
from families import LONGROPE_THRESHOLD, oracle, plain, prefill
from ragcachekit import Prompt, StoreConfig, TreeConfig
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.memory import HostStore
from tree_kit import nodes

FAMILIES = ["llama", "mistral-sliding", "gemma2", "gemma3", "gpt-oss", "qwen3", "phi3-longrope", "cohere"]
SYSTEM, QUESTION, OTHER = text(9, 1), text(6, 4), text(7, 5)
A, B, C, D = (chunk(count, seed) for count, seed in ((33, 11), (25, 12), (17, 13), (21, 14)))
BETWEEN = text(2, 9)
THREE = Prompt([SYSTEM, A, BETWEEN, B, BETWEEN, C, QUESTION])
TWO_OF_THEM = Prompt([SYSTEM, A, BETWEEN, B, BETWEEN, D, OTHER])


def tree_of() -> KnowledgeTree:
    return KnowledgeTree(host_bytes=1 << 28)


def first_log_probs(rag: Any, prompt: Prompt, **options: Any) -> tuple[Any, torch.Tensor]:
    seen: list[torch.Tensor] = []

    def kept(_: Any, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores[0].double().log_softmax(-1))
        return scores

    answer = rag.generate(prompt, max_new_tokens=5, do_sample=False, logits_processor=[kept], **options)
    return answer, seen[0]


def full_log_probs(name: str, prompt: Prompt) -> torch.Tensor:
    return prefill(plain(name), ids(prompt)).logits[-1].double().log_softmax(-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_an_ordinary_prefill(name: str) -> None:
    with rag_for(name, policy="prefix", cold="now", tree=tree_of()) as rag:
        for prompt, known in ((THREE, 0), (THREE, 9 + 33 + 27 + 19), (TWO_OF_THEM, 9 + 33 + 27)):
            answer = rag.generate(prompt, max_new_tokens=5, do_sample=False)
            assert answer.report.link.tree_tokens == known
            assert answer.token_ids == bare(name, prompt)
            # A logits processor of the user's takes the way through a forward ahead of generate.
            answer, seen = first_log_probs(rag, prompt)
            assert answer.token_ids == bare(name, prompt)
            torch.testing.assert_close(seen, full_log_probs(name, prompt), atol=1e-5, rtol=0)


@pytest.mark.parametrize("encoder", ["standalone", "system"])
def test_what_the_chunk_store_has_keeps_nothing_out_of_the_tree_under_prefix(encoder: str) -> None:
    tree, prompt = tree_of(), Prompt([SYSTEM, A, B, QUESTION])
    with rag_for("llama", policy="prefix", encoder=encoder, tree=tree, cold="now") as rag:
        rag.generate(prompt, max_new_tokens=1, policy="reuse")
        tree.forget("default")
        rag.generate(prompt, max_new_tokens=1)
        answer = rag.generate(prompt, max_new_tokens=5, do_sample=False)
        assert answer.report.link.tree_tokens == 9 + 33 + 25
        assert answer.token_ids == bare("llama", prompt)


def test_a_prompt_one_token_beyond_a_change_of_frequencies_is_not_taken_in() -> None:
    tree = tree_of()
    prompt = Prompt([SYSTEM, chunk(LONGROPE_THRESHOLD + 1 - 9 - 6, 40), QUESTION])
    with rag_for("phi3-longrope", policy="prefix", tree=tree, cold="now") as rag:
        for _ in range(2):
            answer = rag.generate(prompt, max_new_tokens=5, do_sample=False)
            assert answer.token_ids == bare("phi3-longrope", prompt)
    assert len(nodes(tree)) == 0, "without its last token it would turn by the frequencies of shorter ones"


def test_two_of_three_documents_are_reused_and_the_third_takes_the_alternative_path() -> None:
    with rag_for("llama", policy="reuse", tree=tree_of(), cold="now") as rag:
        rag.generate(THREE, max_new_tokens=1)
        rag.generate(Prompt([SYSTEM, D, QUESTION]), max_new_tokens=1)  # puts D into the chunk store
        report = rag.generate(TWO_OF_THEM, max_new_tokens=1).report.link
        assert [(u.source, u.exact) for u in report.uses] == [("tree:host", True)] * 3 + [("host", False)]
        assert report.tree_tokens == report.exact_tokens == 9 + 33 + 27
        assert report.approximate_tokens == 21
        assert report.computed_tokens == 2 + 7


POLICIES = ["reuse", "lego:4", "query:0.2", "cacheblend:0.3", "craft:0.5", "random:0.3"]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_approximate_never_enters_the_tree(policy: str) -> None:
    tree = tree_of()
    with rag_for("llama", policy=policy, tree=tree, cold="now") as rag:
        for part in (A, B, C):
            rag.generate(Prompt([OTHER, D, part, QUESTION]), max_new_tokens=1)
        tree.forget("default")
        report = rag.generate(THREE, max_new_tokens=1).report.link
        assert report.approximate_tokens > 0
        assert len(nodes(tree)) == 1, "the system text alone was computed behind nothing approximate"
        again = rag.generate(THREE, max_new_tokens=1).report.link
        assert (again.tree_tokens, len(nodes(tree))) == (9, 1)


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3-longrope"])
def test_everything_in_the_tree_is_what_a_full_prefill_of_its_path_computes(name: str) -> None:
    prompts = [THREE, TWO_OF_THEM, Prompt([SYSTEM, B, A, QUESTION]), Prompt([OTHER, C, QUESTION])]
    known = []
    with rag_for(name, policy="lego:4", tree=tree_of(), cold="now") as rag:
        for prompt in prompts[:3]:
            rag.generate(prompt, max_new_tokens=3)
        rag.generate_batch([prompts[0], prompts[3]], max_new_tokens=3)
        for prompt in prompts:
            full = prefill(oracle(name, len(ids(prompt))), ids(prompt))
            found = rag.plan(rag.prepare(prompt)).prefix_match.match.found
            known.append(len(found))
            for reused in found:
                rows = slice(reused.kv.start, reused.kv.start + reused.kv.tokens)
                for i in range(reused.kv.layers):
                    for ours, theirs in ((reused.kv.keys, full.keys), (reused.kv.values, full.values)):
                        torch.testing.assert_close(ours[i], theirs[i][:, rows], atol=1e-5, rtol=0)
    # All was cold at first; then A and B came from the tree and D was cold; then B and A were known, but
    # not behind each other; the last one's system text is new and C is not.
    short = name != "phi3-longrope"  # there short prompts turn by other frequencies than THREE does
    assert known == ([4, 4, 1, 1] if short else known)
    assert min(known) >= 1


def test_stored_kv_is_never_written_to() -> None:
    tree = tree_of()
    with rag_for("llama", policy="lego:4", tree=tree, cold="now") as rag:
        rag.generate(THREE, max_new_tokens=2)
        copies = {node: tree.levels.use(node).kv for node in nodes(tree)}
        originals = {node: [t.clone() for t in (*kv.keys, *kv.values)] for node, kv in copies.items()}
        for policy in POLICIES:
            rag.generate(TWO_OF_THEM, max_new_tokens=3, policy=policy)
        rag.generate(THREE, max_new_tokens=3, num_beams=2)
        rag.generate_batch([THREE, TWO_OF_THEM], max_new_tokens=3)
        rag.link(THREE)
    assert len(originals) == 4
    for node, kv in copies.items():
        assert all(torch.equal(a, b) for a, b in zip((*kv.keys, *kv.values), originals[node], strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_batches_fill_and_use_the_tree(name: str) -> None:
    tree = tree_of()
    prompts = [THREE, Prompt([SYSTEM, D, QUESTION]), Prompt([C, OTHER])]
    with rag_for(name, policy="prefix", tree=tree, cold="now") as rag:
        for _ in range(2):
            answers = rag.generate_batch(prompts, max_new_tokens=5, do_sample=False)
            assert [a.token_ids for a in answers] == [bare(name, prompt) for prompt in prompts]
        assert tuple(a.report.link.tree_tokens for a in answers) == (88, 30, 17)


def test_full_uses_nothing_and_beams_and_links_use_what_is_there() -> None:
    tree = tree_of()
    with rag_for("llama", policy="prefix", tree=tree, cold="now") as rag:
        assert rag.generate(THREE, max_new_tokens=2, num_beams=2).report.link.tree_tokens == 0
        rag.generate(THREE, max_new_tokens=1)
        assert rag.generate(THREE, policy="full", max_new_tokens=1).report.link.reused_tokens == 0
        assert rag.link(THREE).report.tree_tokens == 88
        beams = rag.generate(THREE, max_new_tokens=4, num_beams=2, do_sample=False)
        given = torch.tensor([ids(THREE)])
        out = plain("llama").generate(given, max_new_tokens=4, num_beams=2, do_sample=False, pad_token_id=0)
        assert beams.token_ids == tuple(out[0, given.shape[1] :].tolist())
        assert beams.report.link.tree_tokens == 88


def test_forgetting_a_chunk_reaches_the_tree() -> None:
    from ragcachekit.types import chunk_id

    tree = tree_of()
    with rag_for("llama", policy="prefix", tree=tree, cold="now") as rag:
        rag.generate(THREE, max_new_tokens=1)
        rag.forget([chunk_id(B.token_ids or (), "default")])
        assert rag.generate(THREE, max_new_tokens=1).report.link.tree_tokens == 9 + 33
        rag.forget()
        assert len(nodes(tree)) == 0


def test_the_disk_keeps_it_for_the_next_process(tmp_path) -> None:
    options = {
        "policy": "prefix",
        "cold": "now",
        "store": StoreConfig(disk_path=tmp_path),
        "tree": TreeConfig(host_bytes=1 << 28, disk_bytes=1 << 28),
    }
    with rag_for("llama", **options) as rag:
        rag.generate(THREE, max_new_tokens=1)
    with rag_for("llama", **options) as rag:
        answer = rag.generate(THREE, max_new_tokens=5, do_sample=False)
        assert answer.report.link.tree_tokens == 88
        assert {use.source for use in answer.report.link.uses} == {"tree:disk"}
        assert answer.report.link.loaded_bytes > 0
        assert answer.token_ids == bare("llama", THREE)
        assert rag.generate(THREE, max_new_tokens=1).report.link.uses[0].source == "tree:host"
    assert DiskStore(tmp_path / "tree", 1 << 28).stats()[0].entries == 4


@pytest.mark.parametrize("cold", ["background", "now"])
def test_no_request_waits_for_the_disk_while_there_is_memory(cold: str) -> None:
    written = []

    class Recorded(HostStore):
        def put(self, key, kv):
            written.append(key)
            return super().put(key, kv)

    tree = KnowledgeTree(host_bytes=1 << 28, disk=Recorded(1 << 28))
    with rag_for("llama", policy="prefix", tree=tree, cold=cold) as rag:
        rag.generate(THREE, max_new_tokens=1)
        rag.generate(TWO_OF_THEM, max_new_tokens=1)
        assert rag.flush()
        kept = len(nodes(tree))
        assert (len(written), kept > 3) == (0, True)
    tree.close()
    assert len(written) == kept


def test_bad_configurations_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="disk_path"):
        rag_for("llama", tree=TreeConfig(disk_bytes=1))
    with pytest.raises(ValueError, match="unknown eviction policy 'mru'"):
        rag_for("llama", tree=TreeConfig(eviction="mru"))
