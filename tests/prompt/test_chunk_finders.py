"""What chunk finders promise, checked on the registry and on a naive finder, its oracle."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcachekit.prompt import registry as registry_module
from ragcachekit.prompt.registry import ChunkRegistry, Match, Matches, forms

# Few letters and a low minimum: overlaps, nesting and shared beginnings everywhere.
dense = st.text(alphabet="ab .\n", min_size=1, max_size=90)
spaces = st.sampled_from(["acme", "bolt"])


def splits_a_word(text: str, edge: int) -> bool:
    """For the letters used here; marks and joiners are in test_segment_text."""
    return 0 < edge < len(text) and text[edge - 1].isalnum() and text[edge].isalnum()


def occurrences(chunks: Iterable[str], text: str) -> tuple[Match, ...]:
    """The leftmost, of these the longest that split no word, one chunk after the other."""
    found: list[Match] = []
    at = 0
    while at < len(text):
        fits = [
            at + len(chunk)
            for chunk in chunks
            if text.find(chunk, at, at + len(chunk)) == at
            and not (splits_a_word(text, at) or splits_a_word(text, at + len(chunk)))
        ]
        if fits:
            found.append(Match(at, max(fits)))
        at = max(fits, default=at + 1)
    return tuple(found)


class NaiveFinder:
    """Every chunk at every position: obviously right, and slow."""

    def __init__(self) -> None:
        self.texts: dict[str, set[str]] = {}

    def add(self, namespace: str, texts: Iterable[str]) -> None:
        for text in texts:
            if text.strip():
                self.texts.setdefault(namespace, set()).update(forms(text))

    def find(self, namespace: str, text: str) -> Matches:
        return Matches(occurrences(self.texts.get(namespace, ()), text))


@pytest.fixture(params=["registry", "naive"])
def finder(request: pytest.FixtureRequest):
    return ChunkRegistry(min_chars=1) if request.param == "registry" else NaiveFinder()


def test_finders_keep_the_contract(finder) -> None:
    finder.add("acme", ["a cat sat", "cat sat on", "a cat", "it"])
    assert finder.find("acme", "so a cat sat on it").found == ((3, 12), (16, 18))
    assert finder.find("acme", "so a cat satin it").found == ((3, 8), (15, 17))
    assert finder.find("acme", "no such thing").found == ()
    assert finder.find("acme", "").found == ()


def test_another_tenants_chunks_are_never_found(finder) -> None:
    finder.add("acme", ["the merger will be announced in May"])
    text = "Context: the merger will be announced in May."
    assert finder.find("acme", text).found
    assert finder.find("bolt", text).found == ()
    assert finder.find("", text).found == ()


@settings(max_examples=150, deadline=None)
@given(st.lists(dense, max_size=12), st.lists(dense, max_size=6), st.data())
def test_registry_finds_what_the_naive_finder_finds(chunks, fillers, data) -> None:
    registry, naive = ChunkRegistry(min_chars=1), NaiveFinder()
    pieces = data.draw(st.lists(st.sampled_from(chunks + fillers), max_size=8)) if chunks + fillers else []
    text = "".join(pieces)
    for chunk in chunks:
        registry.add("acme", [chunk])
        naive.add("acme", [chunk])
        got = registry.find("acme", text)
        assert got.searched is None
        assert got.found == naive.find("acme", text).found


def test_what_can_be_found_is_counted_known_or_not() -> None:
    registry = ChunkRegistry()
    texts = ["Berlin is the capital of Germany.", "  short  ", "", " \n\t" * 20]
    assert registry.add("acme", texts) == 1
    assert registry.add("acme", texts) == 1
    assert len(registry.texts("acme")) == 1
    assert registry.find("acme", "a short trip").found == ()


def test_kept_and_stripped_forms_are_both_found() -> None:
    registry = ChunkRegistry()
    registry.add("acme", ["  A chunk with margins.\n"])
    assert registry.find("acme", "A chunk with margins. And so on").found == ((0, 21),)
    assert registry.find("acme", "x  A chunk with margins.\ny").found == ((1, 25),)


def test_chunks_with_a_common_header_are_found_without_comparing_them_all() -> None:
    registry = ChunkRegistry()
    header = "file_path: /srv/corpus/documents/annual_report.txt\n"
    texts = [f"{header}Section {i} says number {i * 7919} and nothing else at all." for i in range(1500)]
    registry.add("acme", texts)
    prompt = "\n\n".join(texts)
    result = registry.find("acme", prompt)
    assert result.searched is None
    assert result.found == tuple((prompt.index(t), prompt.index(t) + len(t)) for t in texts)


def test_beginnings_of_chunks_are_told_from_whole_ones_and_from_common_headers() -> None:
    registry = ChunkRegistry()
    header = "file_path: /srv/corpus/documents/annual_report_of_the_company_and_all.txt\n"
    texts = [f"{header}Section {i} says {i * 7919}. " + f"{i} and so on, " * 40 for i in range(9)]
    registry.add("acme", [*texts, texts[2] + "\n", "A short one of 31 characters ..."])
    middle = len(texts[2]) // 2
    altered = texts[5].replace("5 and so on, 5", "5 but not on, 5", 1)
    text = f"{texts[0]}\n\n{texts[2][:middle]}\n\n{header}Other. {'x' * 99}\n\nA short one of 31\n\n{altered}"
    result = registry.find("acme", text)
    assert result.found == ((0, len(texts[0])),)
    same = next(at for at, (one, other) in enumerate(zip(texts[5], altered, strict=False)) if one != other)
    assert same < len(texts[5]) / 4  # too short a part
    assert result.parts == ((text.index(texts[2][:middle]), text.index(texts[2][:middle]) + middle),)
    result = registry.find("acme", texts[5][: len(texts[5]) // 3])
    assert (result.found, result.parts) == ((), ((0, len(texts[5]) // 3),))
    assert registry.find("acme", "\n\n".join(texts)).parts == ()


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


def steps_allowed(text: str) -> int:
    """The bound that the search promises, and one place more, which may look at all of the text."""
    return 100_000 + 9 * len(text)


@pytest.mark.parametrize("repeats", [20, 2500, 20_000])
def test_nested_chunks_are_found_in_a_linear_number_of_steps(repeats) -> None:
    registry, chunks = ChunkRegistry(), ["ab " * n for n in range(6, 700)]
    registry.add("acme", chunks)
    text = "Context: " + "ab " * repeats + "end"
    with counted_steps() as steps:
        result = registry.find("acme", text)
    assert result.searched is None
    assert sum(steps) < steps_allowed(text) // 4
    whole, rest = divmod(repeats, 699)
    ends = [9 + 3 * 699 * n for n in range(1, whole + 1)]
    if rest >= 6:
        ends.append(9 + 3 * repeats)
    assert [match.end for match in result.found] == ends


repeated = st.tuples(
    st.sampled_from(["a ", "ab ", "b", " a b"]), st.integers(1, 60), st.sampled_from(["", "b", "X "])
)


@settings(max_examples=150, deadline=None)
@given(st.lists(repeated, min_size=1, max_size=40), st.lists(repeated, max_size=5))
def test_repetitive_chunks_are_found_as_the_naive_finder_finds_them(chunks, text) -> None:
    registry, naive = ChunkRegistry(min_chars=1), NaiveFinder()
    chunks, text = [unit * n + tail for unit, n, tail in chunks], "".join(u * n + t for u, n, t in text)
    for finder in (registry, naive):
        finder.add("acme", chunks)
    with counted_steps() as steps:
        got = registry.find("acme", text)
    assert got.searched is None
    assert got.found == naive.find("acme", text).found
    assert sum(steps) <= steps_allowed(text)
    registry.discard("acme", chunks[::2])
    for chunk in chunks[::2]:
        naive.texts["acme"] -= set(forms(chunk))
    registry.add("acme", chunks[:3])
    naive.add("acme", chunks[:3])
    left = {text for chunk in chunks[1::2] for text in forms(chunk)} & naive.texts["acme"]
    assert left <= naive.texts["acme"]
    assert registry.find("acme", text).found == naive.find("acme", text).found


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
    assert sum(steps) < steps_allowed(text)


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
                registry.discard("acme", [text])

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
            self.registry.discard(namespace, [text])
            lru.pop(text.strip(), None)
            lru.pop(text, None)

    @rule(namespace=spaces)
    def clear(self, namespace: str) -> None:
        self.registry.clear(namespace)
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
