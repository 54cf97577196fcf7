"""Conversations: the next turn reuses the rows of the last one as what they are."""

from random import Random

import pytest

from batch_kit import plan_for
from engine_kit import bare, chunk, ids, rag_for, text
from families import tokens
from ragcachekit import Chunk, Prompt, Text
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree, Turn, Turns
from ragcachekit.prefix_tree.nodes import Root
from ragcachekit.reports import LinkReport
from ragcachekit.store.memory import HostStore
from ragcachekit.types import chunk_id
from tree_kit import ROOT, kv_of, nodes, path_of

SYSTEM, QUESTION, A, B = text(9, 1), text(6, 4), chunk(33, 11), chunk(25, 12)
FIRST = Prompt([SYSTEM, A, B, QUESTION])
ANSWER = 5


def tree_of() -> KnowledgeTree:
    return KnowledgeTree(host_bytes=1 << 28, turns_bytes=1 << 28)


def next_turn(answer: tuple[int, ...], *more: Text | Chunk) -> Prompt:
    asked = Text(token_ids=(*QUESTION.token_ids, *answer, *tokens(8, 77)))  # type: ignore[misc]
    return Prompt([SYSTEM, A, B, asked, *more])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_an_exact_turn_is_gone_on_from_exactly(name: str) -> None:
    with rag_for(name, policy="prefix", tree=tree_of(), cold="now") as rag:
        first = rag.generate(FIRST, max_new_tokens=ANSWER, do_sample=False)
        second = next_turn(first.token_ids)
        answer = rag.generate(second, max_new_tokens=ANSWER, do_sample=False)
        report = answer.report.link
        assert report.exact_tokens == len(ids(FIRST)) + ANSWER - 1, "the last token was never run"
        assert (report.tree_tokens, report.approximate_tokens) == (9 + 33 + 25, 0)
        assert (report.uses[-1].source, report.uses[-1].exact) == ("turn", True)
        assert report.computed_tokens == 8 + 1
        assert answer.token_ids == bare(name, second)
        third = next_turn((*first.token_ids, *tokens(8, 77), *answer.token_ids), chunk(20, 30), QUESTION)
        assert rag.generate(third, max_new_tokens=ANSWER, do_sample=False).token_ids == bare(name, third)


def test_an_approximate_turn_stays_approximate_and_out_of_the_tree() -> None:
    tree = tree_of()
    with rag_for("llama", policy="reuse", tree=tree, cold="now") as rag:
        for part in (A, B):
            rag.generate(Prompt([text(4, 50), part, QUESTION]), max_new_tokens=1)
        first = rag.generate(FIRST, max_new_tokens=ANSWER, do_sample=False)
        assert first.report.link.approximate_tokens == 33 + 25
        prompt = next_turn(first.token_ids)
        for _ in range(2):
            report = rag.generate(prompt, max_new_tokens=ANSWER).report.link
            assert report.exact_tokens == 9, "the system text"
            assert report.approximate_tokens >= len(ids(FIRST)) - 9 + ANSWER - 1
            assert [(use.source, use.exact) for use in report.uses][-1] == ("turn", False)
        at_nine = (n for n in nodes(tree) if sum(step.tokens for step in n.path()[:-1]) == 9)
        assert not any(chunk_id(A.token_ids, "default") in n.step.ids for n in at_nine)
        # Who asks for exactness gets it: approximate rows of a turn are computed again.
        answer = rag.generate(prompt, max_new_tokens=ANSWER, do_sample=False, policy="prefix")
        assert answer.report.link.approximate_tokens == 0
        assert answer.token_ids == bare("llama", prompt)


def test_a_beginning_that_ends_inside_a_chunk_ends_before_it() -> None:
    longer = Chunk(token_ids=(*(B.token_ids or ())[:12], *tokens(9, 90)))
    with rag_for("llama", policy="prefix", tree=tree_of(), cold="now") as rag:
        rag.generate(FIRST, max_new_tokens=1)
        prompt = Prompt([SYSTEM, A, longer, QUESTION])
        answer = rag.generate(prompt, max_new_tokens=ANSWER, do_sample=False)
        assert answer.report.link.exact_tokens == 9 + 33
        assert answer.token_ids == bare("llama", prompt)


def test_forgetting_reaches_turns_and_tenants_share_none() -> None:
    with rag_for("llama", policy="prefix", tree=tree_of(), cold="now") as rag:
        first = rag.generate(FIRST, max_new_tokens=ANSWER)
        second = next_turn(first.token_ids)
        other = rag.generate(second, max_new_tokens=1, namespace="globex").report.link
        assert other.reused_tokens == 0
        rag.forget([chunk_id(B.token_ids or (), "default")])
        report = rag.generate(second, max_new_tokens=1).report.link
        assert report.exact_tokens == 9 + 33
        assert "turn" not in {use.source for use in report.uses}


GUIDED = ("query", "deep", "cacheblend", "cacheblend-gradual")


@pytest.mark.parametrize("kind", GUIDED)
def test_a_policy_that_watches_the_question_watches_what_the_turn_does_not_hold(kind: str) -> None:
    tree = tree_of()
    with rag_for("llama", policy="reuse", tree=tree, cold="now") as rag:
        for part in (A, B):
            rag.generate(Prompt([text(4, 50), part, QUESTION]), max_new_tokens=1)
        first = rag.generate(FIRST, max_new_tokens=ANSWER, do_sample=False)
        second = next_turn(first.token_ids)
        held = len(ids(FIRST)) + ANSWER - 1
        for prompt, known in ((second, held), (FIRST, len(ids(FIRST)) - 1)):
            report = rag.generate(prompt, max_new_tokens=1, policy=f"{kind}:0.3").report.link
            assert report.uses[-1].source == "turn"
            assert report.computed_tokens == len(ids(prompt)) - known
            assert report.recomputed_tokens > 0
            tree.turns.clear()
            rag.generate(FIRST, max_new_tokens=ANSWER, policy="reuse")
        # With everything approximate computed again, the answer is that of an ordinary prefill.
        again = rag.generate(second, max_new_tokens=ANSWER, do_sample=False, policy=f"{kind}:1")
        assert again.token_ids == bare("llama", second)


def test_the_question_that_a_policy_watches_is_what_is_computed_last() -> None:
    with rag_for("llama", policy="reuse", tree=tree_of(), cold="now") as rag:
        for part in (A, B):
            rag.generate(Prompt([text(4, 50), part, QUESTION]), max_new_tokens=1)
        first = rag.generate(FIRST, max_new_tokens=ANSWER, do_sample=False)
        held = len(ids(FIRST)) + ANSWER - 1
        C = chunk(20, 30)
        cases = [
            (next_turn(first.token_ids), range(held, held + 9)),
            (FIRST, range(len(ids(FIRST)) - 1, len(ids(FIRST)))),
            (next_turn(first.token_ids, C, QUESTION), range(held + 9 + 20, held + 9 + 20 + 6)),
            (Prompt([SYSTEM, A, B]), range(9 + 33 + 25 - 1, 9 + 33 + 25)),
        ]
        for policy in ("query:0.3", "craft-focused:1", "cacheblend:0.3"):
            for prompt, expected in cases:
                plan = plan_for(rag, prompt, policy)
                assert plan.question == tuple(expected)
                assert plan.rows[-len(expected) :] == tuple(expected)


def test_a_turn_goes_with_whatever_its_rows_were_computed_behind() -> None:
    tree, C = tree_of(), chunk(21, 14)
    a = chunk_id(A.token_ids or (), "default")
    with rag_for("llama", policy="craft:1", encoder="in-prompt", tree=tree) as rag:
        rag.generate(FIRST, max_new_tokens=1)  # encodes B behind A
        tree.forget("default")
        prompt = Prompt([SYSTEM, C, B, QUESTION])
        report = rag.generate(prompt, max_new_tokens=ANSWER).report.link
        assert report.approximate_tokens > 0, "B comes from behind A"
        assert turns_in(tree) == 1
        rag.forget([a])
        assert turns_in(tree) == 0


def test_a_turn_inherits_what_its_past_was_made_of() -> None:
    tree = tree_of()
    a = chunk_id(A.token_ids or (), "default")
    with rag_for("llama", policy="reuse", tree=tree, cold="now") as rag:
        first = rag.generate(FIRST, max_new_tokens=ANSWER, do_sample=False)
        whole = Text(token_ids=(*ids(FIRST), *first.token_ids, *tokens(8, 77)))
        second = rag.generate(Prompt([whole]), max_new_tokens=ANSWER, do_sample=False)
        assert [use.source for use in second.report.link.uses] == ["turn"]
        rag.forget([a])
        assert turns_in(tree) == 0


def test_a_request_that_still_finds_what_is_being_forgotten_leaves_no_turn() -> None:
    tree = tree_of()

    class Asked(HostStore):
        def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
            reports.append(rag.generate(FIRST, max_new_tokens=ANSWER).report.link)
            return super().forget(namespace, chunk_ids)

    reports: list[LinkReport] = []
    with rag_for("llama", policy="reuse", tree=tree, store=Asked(1 << 28), cold="never") as rag:
        rag.components.background_encoder.now(plan_for(rag, FIRST).missing)
        rag.forget([chunk_id(A.token_ids or (), "default")])
        assert reports[0].approximate_tokens > 0, "it was in the middle of it"
        assert rag.flush(60)
        assert turns_in(tree) == 0


def turns_in(tree: KnowledgeTree) -> int:
    return tree.turns.stats()[0].entries


def turn(count: int, seed: int, *, root: Root = ROOT, members: frozenset[str] = frozenset()) -> Turn:
    return Turn(root, tokens(count, seed), kv_of(root, path_of(f"a{count}")), count, members)


def test_the_budget_holds_and_the_least_recently_used_leaves() -> None:
    size = turn(20, 1).kv.nbytes
    turns = Turns(2 * size)
    for seed in (1, 2):
        turns.keep(turn(20, seed), turns.epoch)
    assert turns.longest(ROOT, tokens(20, 1)) is not None
    turns.keep(turn(20, 3), turns.epoch)
    assert [turns.longest(ROOT, tokens(20, seed)) is None for seed in (1, 2, 3)] == [False, True, False]
    assert not turns.keep(turn(50, 4), turns.epoch)
    assert turns.stats()[0].nbytes == 2 * size


def test_what_began_before_a_forget_is_not_kept_after_it() -> None:
    turns = Turns(1 << 20)
    epoch = turns.epoch
    turns.keep(turn(20, 1, members=frozenset({"x"})), epoch)
    assert turns.forget("acme", frozenset({"y"})) == 0
    assert turns.forget("acme", frozenset({"x"})) == 1
    assert not turns.keep(turn(20, 1), epoch)
    assert turns.longest(ROOT, tokens(20, 1)) is None


def test_any_sequence_of_turns_gives_what_comparing_all_of_them_gives() -> None:
    random = Random(3)

    def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )

    roots = [ROOT, Root("weights-2", "acme")]
    turns, kept = Turns(1 << 30), dict[int, Turn]()
    made: list[tuple[int, ...]] = [tokens(16, 1)]
    for number in range(400):
        past, root = random.choice(made), random.choice(roots)
        made.append(
            (*past[: random.randint(14, len(past))], *random.choices(range(-1, 300), k=random.randint(0, 6)))
        )
        if random.random() < 0.1:
            gone = str(random.randint(0, 9))
            assert turns.forget("acme", frozenset({gone})) == sum(gone in t.members for t in kept.values())
            kept = {n: t for n, t in kept.items() if gone not in t.members}
        given = Turn(root, made[-1], kv_of(root, path_of("a20")), 20, frozenset({str(number % 10)}))
        assert turns.keep(given, turns.epoch)
        kept = {
            n: t
            for n, t in kept.items()
            if t.root != root or shared(t.token_ids, given.token_ids) < len(t.token_ids)
        }
        kept[number] = given
        assert turns.stats()[0].entries == len(kept)
        asked = (*random.choice(made)[: random.randint(14, 40)], *random.choices(range(300), k=3))
        best = max(
            ((shared(t.token_ids, asked), n) for n, t in kept.items() if t.root == root), default=(0, 0)
        )
        found = turns.longest(root, asked)
        assert found == (None if best[0] < 16 else (kept[best[1]], best[0]))
