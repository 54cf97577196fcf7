"""Bounds against the true optimum, found by trying every way to run a tiny cache."""

import itertools
import random

import pytest

from benchmarks.eviction.bounds import most_hits, most_token_hits


def optimum(requests, tokens, capacity, value, parents=None):
    """Best sum of ``value`` over hits: all sets that a cache may hold after each access are tried.

    With ``parents``, a set must hold the parent of everything it holds, and the accesses of a request
    hit only after hits, as in a knowledge tree.
    """
    states = {frozenset(): 0.0}
    for request in requests:
        following = {}
        for kept, score in states.items():
            gained, intact = score, True
            for entry in request:
                intact = entry in kept and (intact or parents is None)
                gained += value(entry) if intact else 0.0
            for size in range(len(kept | set(request)) + 1):
                for held in itertools.combinations(sorted(kept | set(request)), size):
                    chosen = frozenset(held)
                    fits = sum(tokens[e] for e in held) <= capacity
                    closed = parents is None or all(parents[e] in (-1, *chosen) for e in held)
                    if fits and closed and following.get(chosen, -1.0) < gained:
                        following[chosen] = gained
        states = following
    return max(states.values())


def drawn(seed, entries=6, length=22):
    draw = random.Random(seed)
    return [min(draw.randrange(entries), draw.randrange(entries)) for _ in range(length)]


@pytest.mark.parametrize("seed", range(6))
def test_for_equal_sizes_it_is_the_optimum(seed):
    accesses, capacity = drawn(seed), 3 * random.Random(seed).randint(1, 4) + 2
    best = optimum([[a] for a in accesses], [3] * 6, capacity, lambda _: 1)
    assert most_hits(accesses, [3] * 6, capacity) == best
    assert best > 0


@pytest.mark.parametrize("seed", range(10))
def test_for_unequal_sizes_nothing_exceeds_it(seed):
    draw = random.Random(seed)
    accesses, tokens = drawn(seed), [draw.randint(1, 9) for _ in range(6)]
    capacity = draw.randint(3, 20)
    single = [[a] for a in accesses]
    hits = optimum(single, tokens, capacity, lambda _: 1)
    assert hits <= most_hits(accesses, tokens, capacity) <= len(accesses)
    found = optimum(single, tokens, capacity, lambda entry: tokens[entry])
    assert found <= most_token_hits(accesses, tokens, capacity) + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_on_a_tree_of_equal_sizes_it_is_the_optimum_of_the_tree(seed):
    """Entries 0 and 1 come first; 2, 3 after 0; 4, 5 after 1. A request is a path."""
    draw, parents = random.Random(seed), [-1, -1, 0, 0, 1, 1]
    paths = [(0,), (0, 2), (0, 3), (1, 4), (1, 5), (1,)]
    requests = [draw.choice(paths) for _ in range(14)]
    capacity = draw.randint(1, 4)
    best = optimum(requests, [1] * 6, capacity, lambda _: 1, parents)
    accesses = [entry for request in requests for entry in request]
    assert most_hits(accesses, [1] * 6, capacity) == best
