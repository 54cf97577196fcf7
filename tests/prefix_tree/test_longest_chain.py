"""The longest chain of some chunks below a prompt's first text."""

from dataclasses import replace
from itertools import permutations

import pytest

from ragcachekit.prefix_tree import knowledge_tree
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.prefix_tree.nodes import BLOCK, Step, blocks_of, text_step
from tree_kit import ROOT, path_of, request

SYSTEM = tuple(range(2 * BLOCK + 5))
NAMES = "a4", "b5", "c6", "d7", "e8"


def host_tree() -> KnowledgeTree:
    return KnowledgeTree(host_bytes=1 << 24)


def first(text: tuple[int, ...] = SYSTEM) -> tuple[Step, ...]:
    rest = text[len(text) // BLOCK * BLOCK :]
    return (*blocks_of(text, ROOT.namespace), *([text_step(rest, ROOT.namespace)] if rest else []))


def chain(tree: KnowledgeTree, *names: str, text: tuple[int, ...] = SYSTEM, common: int | None = None) -> str:
    """The chunks' letters in the order of the chain."""
    numbers: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        numbers.setdefault(name, []).append(number)
    shared = len(text) if common is None else common
    found = tree.longest_chain(ROOT.fingerprint, ROOT.namespace, text, shared, numbers)
    return "".join(names[number][0] for number in found)


@pytest.mark.parametrize("length", [0, 5, BLOCK, 2 * BLOCK + 5])
def test_first_texts_of_all_lengths(length: int) -> None:
    tree, text = host_tree(), SYSTEM[:length]
    request(tree, (*first(text), *path_of("a4", "b5")))
    assert chain(tree, "b5", "a4", text=text) == "ab"
    assert chain(tree, "b5", "a4", text=(*text[:-1], 99)) == ""


def test_other_first_texts_count_only_from_the_common_tokens_on() -> None:
    tree = host_tree()
    with_a, with_b = (*SYSTEM[:40], *range(100, 140)), (*SYSTEM[:40], *range(200, 203))
    request(tree, (*first(with_a), *path_of("a4", "b5", "c6")))
    request(tree, (*first(with_b), *path_of("b5", "a4")))
    asked = ("c6", "b5", "a4")
    assert chain(tree, *asked, text=with_b) == "ba"
    assert chain(tree, *asked, text=with_b, common=40) == "abc"
    assert chain(tree, *asked[1:], text=with_b, common=40) == "ba", (
        "of equal ones that after most of the text"
    )
    assert chain(tree, *asked[1:], text=with_a, common=40) == "ab"
    assert chain(tree, *asked, text=with_b, common=41) == "ba"


def test_the_longest_is_that_with_most_tokens_and_then_that_in_the_order_given() -> None:
    tree = host_tree()
    for path in (("a4", "b5"), ("e8", "c6"), ("b5", "a4")):
        request(tree, (*first(), *path_of(*path)))
    assert chain(tree, *NAMES) == "ec"
    assert chain(tree, "a4", "b5") == "ab"
    assert chain(tree, "b5", "a4") == "ba"


def test_text_between_chunks_and_parts_of_chunks() -> None:
    tree = host_tree()
    between = text_step(tuple(range(500, 500 + BLOCK)), ROOT.namespace)
    part = Step((f"{'f' * 64}:1:9",), 8)
    request(tree, (*first(), *path_of("a4"), between, part))
    assert chain(tree, "f" * 64, "a4") == "af"
    assert chain(tree, "f" * 64) == ""


def test_all_frequencies_of_the_model_and_no_other_model() -> None:
    tree = host_tree()
    request(tree, (*first(), *path_of("a4")))
    request(tree, (*first(), *path_of("b5", "a4")), replace(ROOT, regime="long"))
    request(tree, (*first(), *path_of("a4", "b5", "c6")), replace(ROOT, fingerprint="weights-2"))
    request(tree, (*first(), *path_of("a4", "c6")), replace(ROOT, namespace="globex"))
    assert chain(tree, "a4", "b5", "c6") == "ba"


def test_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = host_tree()
    for path in permutations(NAMES):
        request(tree, (*first(), *path_of(*path)))
    assert chain(tree, *NAMES) == "abcde"
    monkeypatch.setattr(knowledge_tree, "MAX_LOOKS", 20)
    found = chain(tree, *NAMES)
    assert found, "what was seen until then"
    assert len(set(found)) == len(found)
    monkeypatch.setattr(knowledge_tree, "MAX_LOOKS", 1)
    assert chain(tree, *NAMES) == ""


def test_questions_after_a_chunk_do_not_use_up_the_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = host_tree()
    request(tree, (*first(), *path_of("a4", "b5", "c6")))
    for number in range(40):  # many ask about the first chunk alone
        question = text_step(tuple(range(number, number + BLOCK)), ROOT.namespace)
        request(tree, (*first(), *path_of("a4"), question, question))
    monkeypatch.setattr(knowledge_tree, "MAX_LOOKS", 60)
    assert chain(tree, "c6", "b5", "a4") == "abc"
