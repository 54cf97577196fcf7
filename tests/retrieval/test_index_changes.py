"""Counting the changes of an index, and leaving it what it was."""

import asyncio
import copy
import inspect
import pickle
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from pydantic import BaseModel, Field, PrivateAttr

from ragcachekit.retrieval.partition import attributes, changes_of


class Base(ABC):
    @abstractmethod
    def add_texts(self, texts: list[str]) -> list[str]: ...

    def add_documents(self, texts: list[str]) -> list[str]:
        return self.add_texts(texts)


class Store(Base):
    """An index."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add_texts(self, texts: list[str]) -> list[str]:
        self.texts += texts
        return texts

    async def adelete(self, texts: list[str]) -> None:
        self.texts = [text for text in self.texts if text not in texts]

    def delete(self, texts: list[str]) -> None:
        if not texts:
            raise ValueError("nothing to delete")
        self.texts = [text for text in self.texts if text not in texts]

    def fail(self) -> None:
        self.delete([])

    def aadd_later(self, texts: list[str]) -> Any:
        return self._later(texts)

    async def _later(self, texts: list[str]) -> None:
        self.texts += texts

    def search(self, text: str) -> list[str]:
        return [one for one in self.texts if text in one]

    def address(self) -> str:
        return "no change, though its name begins with add"

    @classmethod
    def from_texts(cls, texts: list[str]) -> "Store":
        store = cls()
        store.add_texts(texts)
        return store

    @property
    def deleted(self) -> bool:
        return not self.texts


class ModelStore(BaseModel):
    texts: list[str] = Field(default_factory=list)
    _client: list[int] = PrivateAttr(default_factory=list)

    def add_texts(self, texts: list[str]) -> None:
        self.texts += texts

    async def adelete(self, texts: list[str]) -> None:
        self.texts = [text for text in self.texts if text not in texts]


def test_every_change_is_counted_before_and_after() -> None:
    store, seen = Store(), list[int | None]()
    first = changes_of(store)
    store.texts = Seen(lambda: seen.append(changes_of(store)))
    store.add_documents(["a"])
    assert len({first, *seen, changes_of(store)}) == 3, "during the change it has a version of its own"
    for call in (lambda: store.delete(["a"]), lambda: asyncio.run(store.adelete(["b"])), store.fail):
        before = changes_of(store)
        with suppress(ValueError):
            call()
        assert changes_of(store) != before


class Seen(list[str]):
    def __init__(self, see: Any) -> None:
        super().__init__()
        self.see = see

    def __iadd__(self, other: Any) -> "Seen":
        self.see()
        self.extend(other)
        return self


def test_changes_that_come_later_are_counted_then() -> None:
    store = Store()
    changes_of(store)  # observed from here on
    later = store.aadd_later(["a"])
    before = changes_of(store)
    asyncio.run(awaited(later))
    assert changes_of(store) != before


async def awaited(one: Any) -> Any:
    return await one


def test_reading_and_changes_of_others_are_no_change() -> None:
    store = Store.from_texts(["a"])
    before = changes_of(store)
    assert store.search("a") == ["a"]
    assert not store.deleted
    assert store.address()
    Store.from_texts(["b"]).delete(["b"])
    assert changes_of(store) == before


def test_the_object_and_its_class_stay_what_they_were() -> None:
    store, other, kind = Store(), Store(), Store
    changes_of(store)
    assert type(store) is kind
    assert (vars(other), attributes(store)) == ({"texts": []}, {"texts": []})
    assert list(inspect.signature(store.delete).parameters) == ["texts"]
    assert inspect.iscoroutinefunction(Store.adelete)


def pickled(protocol: int) -> Any:
    return lambda one: pickle.loads(pickle.dumps(one, protocol))


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickled(2), pickled(5)])
@pytest.mark.parametrize("kind", [Store, ModelStore])
def test_copies_are_counted_on_their_own(kind: Any, make: Any) -> None:
    store = kind()
    before = changes_of(store)
    twin = make(store)
    assert type(twin) is kind
    twin.texts = []
    of_twin = changes_of(twin)
    twin.add_texts(["b"])
    assert (store.texts, twin.texts, changes_of(store)) == ([], ["b"], before)
    assert changes_of(twin) != of_twin
    asyncio.run(store.adelete(["b"]))
    assert changes_of(store) != before


def test_a_version_never_comes_back() -> None:
    store, seen = Store(), list[int | None]()

    def change(_: int) -> None:
        store.add_texts([])
        seen.append(changes_of(store))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(change, range(64)))
    before = changes_of(store)
    store.delete(["a"])
    assert changes_of(store) not in {None, before, *seen}


class Fixed:
    __slots__ = ("texts",)

    def add(self, text: str) -> None:
        self.texts = text


@pytest.mark.parametrize("value", [object(), [], True, Fixed()])
def test_what_cannot_be_observed_says_so(value: object) -> None:
    assert changes_of(value) is None
