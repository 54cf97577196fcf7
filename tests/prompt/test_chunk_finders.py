"""What the registry finds, against a naive search; its bounds, threads, and any sequence of calls."""

import threading
import unicodedata
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcachekit.prompt import segments as registry_module
from ragcachekit.prompt.segments import ChunkRegistry, forms

# Few letters and a low minimum: overlaps, nesting and shared beginnings everywhere.
dense = st.text(alphabet="ab .\n", min_size=1, max_size=90)
signs = st.text(alphabet="aé\u0301ü漢字 \u200d👩🏽क\u093f.\n", min_size=1, max_size=40)
spaces = st.sampled_from(["acme", "bolt"])


def splits_a_word(text: str, edge: int) -> bool:
    if edge in (0, len(text)):
        return False

    def mark(char: str) -> bool:
        return unicodedata.category(char).startswith("M")

    left, right = text[edge - 1], text[edge]
    in_word = (left.isalnum() or mark(left)) and right.isalnum()
    return in_word or mark(right) or "\u200d" in (left, right)


def occurrences(chunks: Iterable[str], text: str) -> tuple[tuple[int, int], ...]:
    """The leftmost, of these the longest that split no word, one chunk after the other."""
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(text):
        fits = [
            at + len(chunk)
            for chunk in chunks
            if text.find(chunk, at, at + len(chunk)) == at
            and not (splits_a_word(text, at) or splits_a_word(text, at + len(chunk)))
        ]
        if fits:
            found.append((at, max(fits)))
        at = max(fits, default=at + 1)
    return tuple(found)


def forms_of(chunks: Iterable[str]) -> set[str]:
    return {form for chunk in chunks for form in forms(chunk) if form.strip()}


def test_another_tenants_chunks_are_never_found() -> None:
    registry, text = ChunkRegistry(), "Context: the merger will be announced in May."
    registry.add("acme", ["the merger will be announced in May"])
    assert registry.find("acme", text).found
    assert registry.find("bolt", text).found == registry.find("", text).found == ()


@settings(max_examples=120, deadline=None)
@given(
    st.one_of(st.tuples(st.lists(one, min_size=1, max_size=12), st.lists(one)) for one in (dense, signs)),
    st.randoms(),
)
def test_the_registry_finds_what_a_naive_search_finds(case, random) -> None:
    chunks, fillers = case
    registry, pieces = ChunkRegistry(min_chars=1), [*random.choices(chunks, k=6), *fillers]
    random.shuffle(pieces)
    text = "".join(pieces)
    for number, chunk in enumerate(chunks, 1):
        registry.add("acme", [chunk])
        got = registry.find("acme", text)
        assert got.searched is None
        assert got.found == occurrences(forms_of(chunks[:number]), text)


def test_what_can_be_found_is_counted_known_or_not() -> None:
    registry = ChunkRegistry()
    texts = ["Berlin is the capital of Germany.", "  short  ", "", " \n\t" * 20]
    assert registry.add("acme", texts) == 1
    assert registry.add("acme", texts) == 1
    assert len(registry.texts("acme")) == 1
    assert registry.find("acme", "a short trip").found == ()


def test_chunks_with_a_common_header_are_found_without_comparing_them_all() -> None:
    registry = ChunkRegistry()
    header = "file_path: /srv/corpus/documents/annual_report.txt\n"
    texts = [f"{header}Section {i} says number {i * 7919} and nothing else at all." for i in range(1500)]
    registry.add("acme", texts)
    prompt = "\n\n".join(texts)
    result = registry.find("acme", prompt)
    assert result.searched is None
    assert result.found == tuple((prompt.index(t), prompt.index(t) + len(t)) for t in texts)


@contextmanager
def counted_steps() -> Iterator[list[int]]:
    """The sizes of all comparisons, in steps of 64 characters."""
    steps: list[int] = []

    def counted(texts: list[str], window: str) -> int:
        steps.append((len(texts).bit_length() + 1) * (1 + len(window) // 64))
        return bisect_right(texts, window)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry_module, "bisect_right", counted)
        yield steps


@pytest.mark.parametrize("repeats", [20, 2500, 20_000])
def test_nested_chunks_are_found_in_a_linear_number_of_steps(repeats) -> None:
    registry, chunks = ChunkRegistry(), ["ab " * n for n in range(6, 700)]
    registry.add("acme", chunks)
    text = "Context: " + "ab " * repeats + "end"
    with counted_steps() as steps:
        result = registry.find("acme", text)
    assert result.searched is None
    assert sum(steps) < (100_000 + 9 * len(text)) // 4
    whole, rest = divmod(repeats, 699)
    ends = [9 + 3 * 699 * n for n in range(1, whole + 1)]
    if rest >= 6:
        ends.append(9 + 3 * repeats)
    assert [end for _, end in result.found] == ends


repeated = st.tuples(
    st.sampled_from(["a ", "ab ", "b", " a b"]), st.integers(1, 60), st.sampled_from(["", "b", "X "])
)


@settings(max_examples=150, deadline=None)
@given(st.lists(repeated, min_size=1, max_size=40), st.lists(repeated, max_size=5))
def test_repetitive_chunks_are_found_as_a_naive_search_finds_them(chunks, text) -> None:
    registry = ChunkRegistry(min_chars=1)
    chunks, text = [unit * n + tail for unit, n, tail in chunks], "".join(u * n + t for u, n, t in text)
    registry.add("acme", chunks)
    with counted_steps() as steps:
        got = registry.find("acme", text)
    assert got.searched is None
    assert got.found == occurrences(forms_of(chunks), text)
    assert sum(steps) <= 100_000 + 9 * len(text)
    registry.forget("acme", chunks[::2])
    registry.add("acme", chunks[:3])
    left = (forms_of(chunks) - forms_of(chunks[::2])) | forms_of(chunks[:3])
    assert registry.find("acme", text).found == occurrences(left, text)


def test_a_search_beyond_its_bound_says_how_far_it_came() -> None:
    registry = ChunkRegistry()
    first = "the first chunk of them all"
    registry.add("acme", [first, *("a " * 20_000 + f"{n} X" for n in range(40))])
    text = f"{first} " + "a " * 40_000
    with counted_steps() as steps:
        result = registry.find("acme", text)
    assert result.found == ((0, len(first)),)
    assert result.searched is not None
    assert len(first) < result.searched < len(text)
    assert sum(steps) < 100_000 + 9 * len(text)


def test_searching_beside_registering_finds_what_stays() -> None:
    registry = ChunkRegistry(max_chunks=400)
    stays = "this one chunk stays registered all along"
    registry.add("acme", [stays])
    failures: list[object] = []

    def search() -> None:
        for _ in range(150):
            if registry.find("acme", f"Context: {stays}").found != ((9, 9 + len(stays)),):
                failures.append("missed")

    def register(worker: int) -> None:
        for i in range(150):
            text = f"worker {worker} brings the passing chunk {i}"
            registry.add("acme", [text])
            if i % 3:
                registry.forget("acme", [text])

    threads = [threading.Thread(target=search) for _ in range(2)]
    threads += [threading.Thread(target=register, args=(w,)) for w in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(registry.texts("acme")) == 1 + 2 * 50


class RegistryMachine(RuleBasedStateMachine):
    """Any sequence of calls agrees with an ordered dict per namespace."""

    LIMIT = 6

    def __init__(self) -> None:
        super().__init__()
        self.registry = ChunkRegistry(max_chunks=self.LIMIT, min_chars=2)
        self.model: dict[str, OrderedDict[str, None]] = {"acme": OrderedDict(), "bolt": OrderedDict()}

    @rule(namespace=spaces, text=dense)
    def add(self, namespace: str, text: str) -> None:
        outcome = self.registry.add(namespace, [text])
        stripped = text.strip()
        if len(stripped) < 2:
            assert outcome == 0
            return
        lru = self.model[namespace]
        assert outcome == 1
        for form in dict.fromkeys([stripped, text]):
            lru.pop(form, None)
            lru[form] = None
        while len(lru) > self.LIMIT:
            lru.popitem(last=False)

    @rule(namespace=spaces, data=st.data())
    def discard(self, namespace: str, data: st.DataObject) -> None:
        if lru := self.model[namespace]:
            text = data.draw(st.sampled_from(sorted(lru)))
            self.registry.forget(namespace, [text])
            lru.pop(text.strip(), None)
            lru.pop(text, None)

    @rule(namespace=spaces)
    def clear(self, namespace: str) -> None:
        self.registry.forget(namespace, None)
        self.model[namespace].clear()

    @invariant()
    def finds_exactly_what_is_registered(self) -> None:
        for namespace, lru in self.model.items():
            assert len(self.registry.texts(namespace)) == len(lru)
            text = " | ".join([*self.model["acme"], *self.model["bolt"]])
            got = self.registry.find(namespace, text).found
            assert got == occurrences(lru, text)
            for start, end in got:  # the search counted as use, in the order found
                for form in dict.fromkeys([text[start:end].strip(), text[start:end]]):
                    if form in lru:
                        lru.move_to_end(form)


RegistryMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestRegistryMachine = RegistryMachine.TestCase
