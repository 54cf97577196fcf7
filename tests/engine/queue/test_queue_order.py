"""The order of waiting requests, against a plain simulation and by its promises."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcachekit.engine.scheduler import CacheAwareOrder


@dataclass(eq=False)
class Item:
    cached: int
    computed: int
    namespace: str = "a"
    number: int = 0
    overtaken: int = 0


def order_of(items, window=32):
    order = CacheAwareOrder(window, lambda item: (item.cached, item.computed))
    for item in items:
        order.add(item, item.namespace)
    return order


def take(order):
    best = order.best()
    order.take(best, best.namespace)
    return best


def drained(order):
    return [take(order) for _ in range(len(order))]


def test_the_most_cached_per_computed_token_is_first_and_ties_come_as_they_arrived():
    items = [Item(0, 10), Item(50, 50), Item(90, 10), Item(90, 10), Item(1000, 1000)]
    a, b, c, d, e = items
    assert drained(order_of(items)) == [c, d, b, e, a]


def test_an_estimate_is_renewed_before_its_item_is_chosen():
    cold, warm = Item(10, 10), Item(90, 10)
    order = order_of([cold, warm])
    assert order.best() is warm
    warm.cached = 0  # evicted
    assert order.best() is cold
    warm.cached = 90
    assert order.best() is warm


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_nobody_is_overtaken_more_than_window_times_and_everybody_has_a_turn(data):
    window = data.draw(st.integers(0, 5))
    order = CacheAwareOrder(window, lambda item: (item.cached, item.computed))
    arrived, turns, left = [], [], set()
    for step in data.draw(st.lists(st.integers(0, 9), max_size=80)):
        if step < 6:
            item = Item(data.draw(st.integers(0, 50)), 1 + step, f"n{step % 2}", len(arrived))
            arrived.append(item)
            order.add(item, item.namespace)
        elif step < 9 and len(order):
            turns.append(take(order))
        elif len(order):
            gone = next(iter(order))
            assert order.discard(gone, gone.namespace)
            assert not order.discard(gone, gone.namespace)
            left.add(gone)
    turns += drained(order)
    assert sorted(i.number for i in [*turns, *left]) == list(range(len(arrived)))
    at = {item: turn for turn, item in enumerate(turns)}
    overtaken = [
        sum(late.number > item.number and late.namespace == item.namespace for late in turns[: at[item]])
        for item in turns
    ]
    assert max(overtaken, default=0) <= window
    assert order.best() is None
    assert len(order) == 0


def test_namespaces_get_equal_shares_of_computed_tokens():
    """One asks for much and often, one seldom for little: each gets half while both wait."""
    greedy = [Item(0, 1000, "greedy") for _ in range(50)]
    small = [Item(0, 100, "small") for _ in range(100)]
    order = order_of([*greedy, *small])
    computed = Counter()
    for _ in range(100):
        item = take(order)
        computed[item.namespace] += item.computed
        assert abs(computed["greedy"] - computed["small"]) <= 1000
    assert min(computed.values()) > 8000


def test_a_new_namespace_has_no_credit_of_the_past_and_an_old_one_no_debt():
    order = order_of([Item(0, 100, "old") for _ in range(60)])
    for _ in range(40):
        take(order)
    for _ in range(20):
        order.add(Item(0, 100, "new"), "new")
    turns = Counter(take(order).namespace for _ in range(20))
    assert 9 <= turns["new"] <= 11


@pytest.mark.parametrize("namespaces", [1, 1000])
def test_a_choice_looks_at_its_window_alone(namespaces):
    asked = Counter()

    def estimate(item):
        asked[item] += 1
        return item.cached, item.computed

    order = CacheAwareOrder(32, estimate)
    for number in range(1000):
        order.add(Item(number % 7, 10, f"n{number % namespaces}"), f"n{number % namespaces}")
    take(order)
    asked.clear()
    take(order)
    assert asked.total() <= 34


def test_what_is_not_ready_comes_after_the_others_until_it_may_wait_no_longer():
    loading, others = Item(90, 10), [Item(0, 10) for _ in range(6)]
    order, turns = order_of([loading, *others], window=3), []
    while len(order):
        best = order.best(lambda item: item is not loading)
        order.take(best, best.namespace)
        turns.append(best)
    assert turns == [*others[:3], loading, *others[3:]]
