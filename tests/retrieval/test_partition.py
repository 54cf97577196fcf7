"""Keys of what results depend on: equal for equal content, refused where content does not show."""

import copy
import datetime
import decimal
import enum
import functools
import gc
import random
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

from ragcachekit.retrieval.partition import (
    MAX_VALUES,
    Identity,
    KeyReader,
    KeyRules,
    NotKeyable,
)

KNOWN = KeyRules(libraries=frozenset({__name__.partition(".")[0]}))
"""Takes the classes of this module for those of a library."""


def key_of(value: object, rules: KeyRules = KNOWN) -> Hashable:
    return KeyReader(rules).key(value)


def key_of_own(value: object) -> Hashable:
    return KeyReader().key(value)


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


class Options(dict[str, int]):
    pass


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int


def of_model(value: int) -> Model:
    model = Model(field=[1])
    model._private.append(value)
    return model


DIFFERENT = {
    "bool": (1, True),
    "float": (1, 1.0),
    "zeros": (0.0, -0.0),
    "tuple": ([1, 2], (1, 2)),
    "order": ([1, 2], [2, 1]),
    "order of a dict": ({"a": 1, "b": -1}, {"b": -1, "a": 1}),
    "a value": ({"a": 1}, {"a": "1"}),
    "a key more": ({"a": 1}, {"a": 1, "b": None}),
    "nothing": ("", None),
    "decimals": (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    "dates": (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
    "a fold": (datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 1, fold=1)),
    "a list in an attribute": (Plain([1]), Plain([2])),
    "an object in an object": (Plain(Plain([1])), Plain(Plain([2]))),
    "a model's field": (Model(field=[1]), Model(field=[2])),
    "a model's private attribute": (of_model(1), of_model(2)),
    "a dataclass": (Data([1]), Data([2])),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_what_differs_in_content_differs_in_key(kind: str) -> None:
    one, other = DIFFERENT[kind]
    assert key_of(one) != key_of(other)
    twin = copy.deepcopy(one)
    assert key_of(one) == key_of(twin)
    assert hash(key_of(one)) == hash(key_of(twin))


@pytest.mark.parametrize(
    "value", [types.MappingProxyType({}), defaultdict(int), np.zeros(2), Options(a=1), Named("a"), Point(1)]
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
    assert inner.computed is not None
    assert key_of(outer) == before


def test_cycles_are_refused() -> None:
    one = Plain(None)
    one.value = [one]
    with pytest.raises(NotKeyable, match="too much of it"):
        key_of(one)


trees = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a"]) | st.sampled_from(Colour),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
        | st.builds(Plain, inner)
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
    return [type(value).__name__, repr(value)]


@settings(max_examples=150, deadline=None)
@given(trees, trees)
def test_keys_are_equal_exactly_where_the_content_is(one: object, other: object) -> None:
    assert (key_of(one) == key_of(other)) == (repr(written(one)) == repr(written(other)))


@pytest.mark.parametrize(
    "value",
    [
        lambda: 1,
        [Plain(1)],
        of_model(1),
        functools.partial(len),
        Plain(0).__init__,
        random.Random(0).random,
        iter([1]),
        Data([1]),
        Point(1),
        Options(a=1),
        Colour.RED,
        Named("a"),
        np.frompyfunc(len, 1, 1),
        Plain,
        random,
    ],
)
def test_what_may_depend_on_anything_is_refused(value: object) -> None:
    """Data of the user's own classes, too: it may be called, or compute what it seems to hold."""
    with pytest.raises(NotKeyable, match="may depend on anything"):
        key_of_own(value)


def test_the_place_of_what_is_refused_is_named() -> None:
    with pytest.raises(NotKeyable, match=r"Plain\.value: Plain\.value: a builtins\.list_iterator may"):
        key_of(Plain([Plain(iter([1]))]))


@pytest.mark.parametrize("value", [[[n] for n in range(MAX_VALUES + 1)], list(range(MAX_VALUES + 1))])
def test_what_is_too_large_is_refused(value: object) -> None:
    with pytest.raises(NotKeyable, match="too much of it"):
        key_of(Plain({"content": value}))


def test_an_object_may_say_what_counts() -> None:
    class Searching:
        def __init__(self, k: int) -> None:
            self.k, self.searches = k, 0

        def cache_key_parts(self) -> tuple[int]:
            return (self.k,)

    one = Searching(3)
    before = key_of_own(one)
    one.searches += 1
    assert key_of_own(one) == before != key_of_own(Searching(4))


def test_what_a_librarys_class_says_does_not_hold_for_subclasses_of_others() -> None:
    said = type("Library", (), {"__module__": "library", "cache_key_parts": lambda self: ()})
    own = type("Own", (said,), {"__module__": "mine"})
    rules = KeyRules(libraries=frozenset({"library"}))
    assert key_of(said(), rules) == key_of(said(), rules)
    with pytest.raises(NotKeyable, match="Own may depend on anything"):
        key_of(own(), rules)


def test_identities() -> None:
    class Weak:
        pass

    one, items = Weak(), [1]
    assert Identity(one) == Identity(one) != Identity(Weak())
    assert Identity(items) == Identity(items) != Identity([1])
    first, second = Identity(one), Identity(one)
    del one
    gc.collect()
    assert first == second, "or an entry could not be found under its own key"
    assert all(Identity(Weak()) != first for _ in range(1000))
