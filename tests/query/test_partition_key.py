"""The hard part of the key."""

from __future__ import annotations

import numpy as np
import pytest

from ragcachekit.query.base import Partition
from ragcachekit.query.partition.keys import object_key


class Opaque:
    """Its methods might read anything."""


def test_equal_arguments_make_one_partition() -> None:
    one = Partition.of("t", 4, filters={"a": [1, {"b"}], "c": None}, search_kwargs={"x": 1, "y": 2})
    two = Partition.of("t", 4, filters={"a": [1, {"b"}], "c": None}, search_kwargs={"x": 1, "y": 2})
    assert one == two
    assert hash(one) == hash(two)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, True),
        (1, 1.0),
        ([1, 2], (1, 2)),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": "1"}),
        ({"a": 1}, {"a": 1, "b": None}),
        (np.array([1, 2]), np.array([1, 3])),
        (np.array([1.0]), np.array([1.0], np.float32)),
        ("", None),
    ],
)
def test_different_values_stay_apart(left: object, right: object) -> None:
    assert object_key(left) != object_key(right)


@pytest.mark.parametrize("value", [{"a": {"b": [1]}}, np.array([1, 2]), {1, 2}, len])
def test_frozen_values_hash(value: object) -> None:
    assert hash(object_key(value)) == hash(object_key(value))


def test_every_argument_counts() -> None:
    plain = Partition.of("t", 4)
    others = {
        Partition.of("u", 4),
        Partition.of("t", 5),
        Partition.of("t", 4, filters={"a": 1}),
        Partition.of("t", 4, search_kwargs={"a": 1}),
        Partition.of("t", 4, index_id="v2"),
    }
    assert len(others) == 5
    assert plain not in others


@pytest.mark.parametrize("k", [0, -1])
def test_k_must_be_positive(k: int) -> None:
    with pytest.raises(ValueError, match="k must be > 0"):
        Partition.of("t", k)


def test_k_must_be_an_int() -> None:
    with pytest.raises(TypeError, match="k must be an int"):
        Partition.of("t", 4.0)  # type: ignore[arg-type]


def test_what_cannot_be_keyed_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a .*Opaque may depend on anything"):
        Partition.of("t", 4, filters=[Opaque()])
