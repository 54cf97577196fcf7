"""Keys of objects: equal for equal content at any depth, refused where content does not show."""

from __future__ import annotations

import copy
import datetime
import enum
import functools
import re
import threading
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, PrivateAttr

from ragcachekit.query.key_walk import MAX_LIBRARY_NODES, MAX_NODES, SCALARS_PER_NODE, freeze, object_key
from ragcachekit.query.keys import HashedKey, Identity, KeyRules, NotKeyable

limit = {"documents": 3}


class Slotted:
    __slots__ = ("__hidden", "shown")

    def __init__(self, shown: object, hidden: object) -> None:
        self.shown, self.__hidden = shown, hidden


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value


class Model(BaseModel):
    field: list[int]
    _private: list[int] = PrivateAttr(default_factory=list)


@dataclass
class Data:
    items: list[int] = field(default_factory=list)


class Options(dict[str, int]):
    def __init__(self, value: int) -> None:
        super().__init__(a=1)
        self.value = value


class Colour(enum.Enum):
    RED = 1


def of_model(value: int) -> Model:
    model = Model(field=[1])
    model._private.append(value)
    return model


PAIRS = {
    "a list in an attribute": (Plain([1]), Plain([2])),
    "an object in an object": (Plain(Plain([1])), Plain(Plain([2]))),
    "a public slot": (Slotted([1], 0), Slotted([2], 0)),
    "a private slot": (Slotted(0, [1]), Slotted(0, [2])),
    "a model's field": (Model(field=[1]), Model(field=[2])),
    "a model's private attribute": (of_model(1), of_model(2)),
    "a dataclass": (Data([1]), Data([2])),
    "an array": (np.array([1]), np.array([2])),
    "a pattern": (re.compile("a"), re.compile("a", re.I)),
    "a date": (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
    "a namespace": (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    "a subclass of dict": (type("D", (dict,), {})(a=1), {"a": 1}),
    "an attribute of a dict's subclass": (Options(1), Options(2)),
    "bytes and bytearray": (b"a", bytearray(b"a")),
    "a partial's argument": (functools.partial(len, [1]), functools.partial(len, [2])),
    "types of numbers": ([1], [True]),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_what_differs_in_content_differs_in_key(kind: str) -> None:
    one, other = PAIRS[kind]
    assert freeze(one) != freeze(other)
    assert freeze(one) == freeze(copy.deepcopy(one))
    assert hash(freeze(one)) == hash(freeze(copy.deepcopy(one)))


def test_an_object_changed_in_place_has_another_key() -> None:
    inner = Plain({"user": ["a"]})
    outer = Plain([inner])
    before = freeze(outer)
    inner.value["user"].append("b")  # type: ignore[index]
    assert freeze(outer) != before
    inner.value["user"].pop()  # type: ignore[index]
    assert freeze(outer) == before


def test_cycles_end() -> None:
    def ring(value: int) -> Plain:
        one = Plain(None)
        one.value = [value, one]
        return one

    assert freeze(ring(1)) == freeze(ring(1)) != freeze(ring(2))


def test_values_shared_by_two_attributes_count_in_both() -> None:
    shared = [1]
    assert freeze(Plain((shared, shared))) == freeze(Plain(([1], [1]))) != freeze(Plain(([1], [2])))


trees = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from(["", "a"]), st.sampled_from(Colour)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        st.builds(Plain, inner),
        st.builds(Slotted, inner, inner),
    ),
    max_leaves=8,
)


def written(value: Any) -> object:
    """An independent description: a string for every value, equal only for equal content."""
    if isinstance(value, list):
        return ["list", *map(written, value)]
    if isinstance(value, dict):
        return ["dict", *sorted((key, repr(written(one))) for key, one in value.items())]
    if isinstance(value, Plain):
        return ["Plain", written(value.value)]
    if isinstance(value, Slotted):
        return ["Slotted", written(value.shown), written(value._Slotted__hidden)]  # type: ignore[attr-defined]
    return [type(value).__name__, repr(value)]


@settings(max_examples=300, deadline=None)
@given(trees, trees)
def test_keys_are_equal_exactly_where_the_content_is(one: object, other: object) -> None:
    assert (freeze(one) == freeze(other)) == (repr(written(one)) == repr(written(other)))


# -- code ------------------------------------------------------------------------------------------


class Reading:
    """Reads a name of the module in a method."""

    def read(self) -> int:
        return limit["documents"]


class Shared:
    options: dict[str, int] = {"k": 1}  # noqa: RUF012


class Inherited(Shared):
    @property
    def limited(self) -> int:
        return limit["documents"]


def test_what_methods_read_counts() -> None:
    for one in (Reading(), Inherited()):
        before = freeze(one)
        limit["documents"] = 4
        assert freeze(one) != before
        limit["documents"] = 3
        assert freeze(one) == before


def test_class_attributes_count() -> None:
    before = freeze(Inherited())
    Shared.options["k"] = 2
    assert freeze(Inherited()) != before
    Shared.options["k"] = 1
    assert freeze(Inherited()) == before


def test_the_same_name_as_an_attribute_is_no_read() -> None:
    class Named:
        def __init__(self) -> None:
            self.unreadable = 1

        def read(self) -> int:
            return self.unreadable

    globals()["unreadable"] = iter(())
    assert freeze(Named()) == freeze(Named())


def test_own_code_is_told_apart() -> None:
    rules = KeyRules(libraries=frozenset({"pydantic"}))
    assert object_key(Plain(1), rules).own_code
    assert not object_key([{"a": datetime.date(2026, 1, 1)}], rules).own_code


# -- what cannot be read ---------------------------------------------------------------------------


class Generator:
    def __init__(self) -> None:
        self.items = iter([1])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: 1, "may depend on anything"),
        ([Plain(lambda: 1)], "Plain.value: the function .* may depend on anything"),
        (Plain(0).__init__, "may depend on anything"),
        (Generator(), "Generator.items: a builtins.list_iterator does not show its content"),
        ([[n] for n in range(MAX_NODES + 1)], "too much of it"),
        ([*range((MAX_NODES + 1) * SCALARS_PER_NODE), []], "too much of it"),
        (np.zeros(10**6), "large ndarray"),
    ],
)
def test_what_does_not_show_its_content_is_refused(value: object, message: str) -> None:
    with pytest.raises(NotKeyable, match=message):
        freeze(value)


def test_a_sentinel_is_itself() -> None:
    one, other = object(), object()
    assert freeze([one]) == freeze([one]) != freeze([other])


def test_locks_change_nothing() -> None:
    assert freeze(Plain(threading.Lock())) == freeze(Plain(threading.RLock()))


def library() -> Any:
    """A new class of a known library."""
    return type("Library", (), {"__module__": "known"})


KNOWN = KeyRules(libraries=frozenset({"known"}))


def test_a_librarys_unreadable_attribute_is_itself() -> None:
    client, kind = iter(()), library()
    one, same, other = kind(), kind(), kind()
    one.client = same.client = client
    other.client = iter(())
    assert object_key(one, KNOWN).key == object_key(same, KNOWN).key != object_key(other, KNOWN).key


def test_a_librarys_large_attribute_is_itself_and_small_ones_are_compared() -> None:
    kind = library()
    small, large = kind(), kind()
    small.items, large.items = [[1]], [[n] for n in range(MAX_LIBRARY_NODES + 1)]
    keys = [object_key(one, KNOWN).key for one in (small, large)]
    small.items[0].append(2)
    large.items[0].append(2)
    assert [object_key(one, KNOWN).key == key for one, key in zip((small, large), keys, strict=True)] == [
        False,
        True,
    ]


def test_own_code_in_a_librarys_attribute_is_refused_where_it_cannot_be_read() -> None:
    kind = library()
    one = kind()
    one.inner = Generator()
    with pytest.raises(NotKeyable, match=r"Generator\.items"):
        object_key(one, KNOWN)


def test_identities() -> None:
    class Weak:
        pass

    one, items = Weak(), [1]
    assert Identity(one) == Identity(one) != Identity(Weak())
    assert Identity(items) == Identity(items) != Identity([1])
    assert hash(Identity(one)) == hash(Identity(one))
    gone = Identity(Weak())
    assert gone != gone.__class__(one)
    assert gone != gone, "what is gone is equal to nothing, not to what took its address"


def test_hashes_are_computed_once() -> None:
    class Counted:
        hashed = 0

        def __hash__(self) -> int:
            Counted.hashed += 1
            return 1

    key = HashedKey(Counted())
    assert hash(key) == hash(key)
    assert Counted.hashed == 1


def test_an_object_may_say_what_counts() -> None:
    class Searching:
        def __init__(self, k: int) -> None:
            self.k, self.searches = k, 0

        def cache_key_parts(self) -> tuple[int]:
            return (self.k,)

    one = Searching(3)
    before = freeze(one)
    one.searches += 1
    assert freeze(one) == before != freeze(Searching(4))
