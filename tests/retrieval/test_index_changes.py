"""Counting the changes of an index, and leaving it what it was."""

from __future__ import annotations

import asyncio
import copy
import pickle
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel, Field, PrivateAttr

from ragcachekit.retrieval.partition import attributes, observe


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

    def aadd_later(self, texts: list[str]) -> Any:
        return self._later(texts)

    async def _later(self, texts: list[str]) -> None:
        self.texts += texts

    def search(self, text: str) -> list[str]:
        return [one for one in self.texts if text in one]

    def address(self) -> str:
        return "no change, though its name begins with add"

    @classmethod
    def from_texts(cls, texts: list[str]) -> Store:
        store = cls()
        store.add_texts(texts)
        return store

    @property
    def deleted(self) -> bool:
        return not self.texts


class ModelStore(BaseModel):
    texts: list[str] = Field(default_factory=list)
    _client: list[int] = PrivateAttr(default_factory=list)

    def add(self, texts: list[str]) -> None:
        self.texts += texts

    async def async_add(self, texts: list[str]) -> None:
        self.add(texts)


def version(store: object) -> int:
    changes = observe(store)
    assert changes is not None
    return changes.version


def test_every_change_is_counted_before_and_after() -> None:
    store, seen = Store(), list[int]()
    assert version(store) == 0
    store.texts = Seen(lambda: seen.append(version(store)))
    store.add_documents(["a"])
    assert seen == [2], "before the change, by both methods"
    assert version(store) == 4
    for call in (lambda: store.delete(["a"]), lambda: asyncio.run(store.adelete(["b"]))):
        before = version(store)
        call()
        assert version(store) >= before + 2
    before = version(store)
    with pytest.raises(ValueError, match="nothing to delete"):
        store.delete([])
    assert version(store) == before + 2


class Seen(list[str]):
    def __init__(self, see: Any) -> None:
        super().__init__()
        self.see = see

    def __iadd__(self, other: Any) -> Seen:
        self.see()
        self.extend(other)
        return self


def test_changes_that_come_later_are_counted_then() -> None:
    store = Store()
    assert version(store) == 0  # observed from here on
    later = store.aadd_later(["a"])
    before = version(store)
    asyncio.run(awaited(later))
    assert version(store) >= before + 2


async def awaited(one: Any) -> Any:
    return await one


def test_reading_is_no_change() -> None:
    store = Store.from_texts(["a"])
    before = version(store)
    assert store.search("a") == ["a"]
    assert not store.deleted
    assert store.address()
    assert version(store) == before


def test_the_object_stays_what_it_was() -> None:
    store, other, kind = Store(), Store(), Store
    version(store)
    assert type(store) is kind
    assert (vars(other), attributes(store)) == ({"texts": []}, {"texts": []})
    assert observe(store) is observe(store)


def pickled(protocol: int) -> Any:
    return lambda one: pickle.loads(pickle.dumps(one, protocol))


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, *(pickled(n) for n in range(2, 6))])
def test_copies_are_of_the_class_itself_and_their_own(make: Any) -> None:
    store = Store()
    version(store)
    twin = make(store)
    assert type(twin) is Store
    twin.texts = []
    twin.add_texts(["b"])
    assert (store.texts, twin.texts, version(store)) == ([], ["b"], 0)


def test_models_stay_models() -> None:
    store = ModelStore(texts=["a"])
    before = store.model_dump()
    assert version(store) == 0
    assert store.model_dump() == before
    assert repr(store) == "ModelStore(texts=['a'])"
    store._client.append(1)
    asyncio.run(store.async_add(["b"]))
    counted = version(store)
    assert counted >= 4
    twin = store.model_copy(deep=True)
    before = version(twin)
    twin.add(["c"])
    assert (store.texts, twin.texts) == (["a", "b"], ["a", "b", "c"])
    assert (version(store), version(twin)) == (counted, before + 2), "each has a counter of its own"


def test_threads_that_observe_at_once_share_one_counter() -> None:
    store = Store()
    with ThreadPoolExecutor(8) as pool:
        counters = list(pool.map(lambda _: observe(store), range(64)))
    assert len({id(one) for one in counters}) == 1


class Fixed:
    __slots__ = ("texts",)

    def add(self, text: str) -> None:
        self.texts = text


def test_what_cannot_be_observed_says_so() -> None:
    assert observe(object()) is None
    assert observe([]) is None
    assert observe(True) is None
    assert observe(Fixed()) is None
