"""Keys of objects: equal for equal content at any depth, refused where content does not show."""

from __future__ import annotations

import array
import copy
import datetime
import decimal
import enum
import functools
import gc
import pathlib
import random
import re
import threading
import types
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, PrivateAttr
from tokenizers import Tokenizer, models

from ragcachekit.query.partition.keys import MAX_VALUES, NotKeyable, TooLarge, object_key
from ragcachekit.query.partition.objects import Identity
from ragcachekit.query.partition.rules import KeyRules

KNOWN = KeyRules(libraries=frozenset({__name__.partition(".")[0]}))
"""Takes the classes of this module for those of a library."""


def key_of(value: object) -> Hashable:
    return object_key(value, KNOWN)


class Slotted:
    __slots__ = ("__hidden", "shown")

    def __init__(self, shown: object, hidden: object) -> None:
        self.shown, self.__hidden = shown, hidden


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value

    @functools.cached_property
    def computed(self) -> object:
        return iter(())


class Model(BaseModel):
    field: list[int]
    _private: list[int] = PrivateAttr(default_factory=list)


@dataclass
class Data:
    items: list[int] = field(default_factory=list)


class Named(str):
    pass


class Number(int):
    pass


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
    "a partial's argument": (functools.partial(len, [1]), functools.partial(len, [2])),
    "types of numbers": ([1], [True]),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_what_differs_in_content_differs_in_key(kind: str) -> None:
    one, other = PAIRS[kind]
    assert key_of(one) != key_of(other)
    twin = copy.deepcopy(one)
    assert key_of(one) == key_of(twin)
    assert hash(key_of(one)) == hash(key_of(twin))


@pytest.mark.parametrize(
    "value",
    [
        types.MappingProxyType({"a": 1}),
        array.array("I", [1]),
        bytearray(b"a"),
        defaultdict(int),
        np.ma.masked_array([1]),
        Options(1),
        Named("a"),
        Number(1),
    ],
)
def test_containers_and_values_of_other_kinds_are_refused(value: object) -> None:
    """They may hold more than their items, also those of a library."""
    with pytest.raises(NotKeyable):
        key_of(Plain([value]))


def test_an_object_changed_in_place_has_another_key() -> None:
    inner = Plain({"user": ["a"]})
    outer = Plain([inner])
    before = key_of(outer)
    inner.value["user"].append("b")  # type: ignore[index]
    assert key_of(outer) != before
    inner.value["user"].pop()  # type: ignore[index]
    assert key_of(outer) == before


def test_cycles_end() -> None:
    def ring(value: int) -> Plain:
        one = Plain(None)
        one.value = [value, one]
        return one

    assert key_of(ring(1)) == key_of(ring(1)) != key_of(ring(2))


def test_values_shared_by_two_attributes_count_in_both() -> None:
    shared = [1]
    assert key_of(Plain((shared, shared))) == key_of(Plain(([1], [1]))) != key_of(Plain(([1], [2])))


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
        return ["dict", *((key, repr(written(one))) for key, one in value.items())]
    if isinstance(value, Plain):
        return ["Plain", written(value.value)]
    if isinstance(value, Slotted):
        return ["Slotted", written(value.shown), written(value._Slotted__hidden)]  # type: ignore[attr-defined]
    return [type(value).__name__, repr(value)]


@settings(max_examples=300, deadline=None)
@given(trees, trees)
def test_keys_are_equal_exactly_where_the_content_is(one: object, other: object) -> None:
    assert (key_of(one) == key_of(other)) == (repr(written(one)) == repr(written(other)))


# -- what cannot be read ---------------------------------------------------------------------------


@dataclass
class WithMethod:
    user: str = "a"

    def allows(self, other: str) -> bool:
        return other == self.user


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: 1, "the function .* may depend on anything"),
        ([Plain(1)], "a .*Plain may depend on anything"),
        (WithMethod(), "a .*WithMethod may depend on anything"),
        (of_model(1), "a .*Model may depend on anything"),
        (functools.wraps(copy.copy)(lambda one: one), "may depend on anything"),
        (Plain(0).__init__, "may depend on anything"),
        (random.Random(0).random, "a random.Random does not show its content"),
        ({"a": iter([1])}, "a builtins.list_iterator does not show its content"),
        ([memoryview(b"a")], "a builtins.memoryview does not show its content"),
        (np.array([object()]), "an array of objects"),
    ],
)
def test_what_may_depend_on_anything_is_refused(value: object, message: str) -> None:
    with pytest.raises(NotKeyable, match=message):
        object_key(value)


def test_the_place_of_what_is_refused_is_named() -> None:
    with pytest.raises(
        NotKeyable, match=r"Plain\.value: .*Slotted\.shown: a builtins\.list_iterator does not"
    ):
        key_of(Plain([Slotted(iter([1]), 0)]))


@pytest.mark.parametrize(
    "value",
    [
        [[n] for n in range(MAX_VALUES + 1)],
        list(range(MAX_VALUES + 1)),
        np.zeros(10**6),
    ],
)
def test_what_is_too_large_is_refused(value: object) -> None:
    with pytest.raises(TooLarge, match="too much of it"):
        object_key(value)
    with pytest.raises(TooLarge):
        key_of(Plain({"content": value}))


@pytest.mark.parametrize(
    "value", [Data([1]), Point(1), Options(1), Colour.RED, Named("a"), np.frompyfunc(len, 1, 1)]
)
def test_data_of_the_users_own_classes_is_refused(value: object) -> None:
    """It may be called, or compute what it seems to hold."""
    with pytest.raises(NotKeyable, match="may depend on anything"):
        object_key(value)


def test_what_a_class_says_does_not_hold_for_subclasses_of_others() -> None:
    said = type("Library", (), {"__module__": "logging", "cache_key_parts": lambda self: ()})
    own = type("Own", (said,), {"__module__": "mine"})
    assert object_key(said()) == object_key(said())
    with pytest.raises(NotKeyable, match="Own may depend on anything"):
        object_key(own())


DIFFERENT = [
    ({"a": 1, "b": -1}, {"b": -1, "a": 1}),
    (0.0, -0.0),
    (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    (pathlib.PureWindowsPath("A"), pathlib.PureWindowsPath("a")),
    (
        datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        datetime.datetime(2026, 1, 1, fold=1, tzinfo=datetime.UTC),
    ),
    (re.compile("a" * 300 + "b"), re.compile("a" * 300 + "c")),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_values_that_are_equal_and_not_the_same_stay_apart(one: object, other: object) -> None:
    assert object_key(one) != object_key(other)
    assert object_key(one) == object_key(copy.deepcopy(one))


def test_known_functions_are_themselves() -> None:
    assert object_key([len, copy.copy]) == object_key([len, copy.copy]) != object_key([len, copy.deepcopy])
    items = {"user": "a"}
    before = object_key(items.get)
    items["user"] = "b"
    assert object_key(items.get) != before, "what a bound method is bound to counts"


def test_locks_change_nothing() -> None:
    assert key_of(Plain(threading.Lock())) == key_of(Plain(threading.Lock()))


def test_computed_properties_change_nothing() -> None:
    one = Plain(1)
    before = key_of(one)
    assert one.computed is not None
    assert key_of(one) == before


def test_a_librarys_object_written_in_c_is_itself() -> None:
    rules = KeyRules(libraries=frozenset({"tokenizers"}))
    one, other = Tokenizer(models.BPE()), Tokenizer(models.BPE())
    assert object_key(one, rules) == object_key(one, rules) != object_key(other, rules)
    with pytest.raises(NotKeyable):
        object_key(one)


def test_a_sentinel_is_itself() -> None:
    one, other = object(), object()
    assert object_key([one]) == object_key([one]) != object_key([other])


def test_identities() -> None:
    class Weak:
        pass

    one, items = Weak(), [1]
    assert Identity(one) == Identity(one) != Identity(Weak())
    assert Identity(items) == Identity(items) != Identity([1])
    assert hash(Identity(one)) == hash(Identity(one))


def test_identities_of_what_is_gone_stay_equal_to_each_other_alone() -> None:
    class Weak:
        pass

    one = Weak()
    first, second = Identity(one), Identity(one)
    del one
    gc.collect()
    assert first == second, "or an entry could not be found under its own key"
    assert all(Identity(Weak()) != first for _ in range(1000))


def test_an_object_may_say_what_counts() -> None:
    class Searching:
        def __init__(self, k: int) -> None:
            self.k, self.searches = k, 0

        def cache_key_parts(self) -> tuple[int]:
            return (self.k,)

    one = Searching(3)
    before = object_key(one)
    one.searches += 1
    assert object_key(one) == before != object_key(Searching(4))
