"""The ranking itself: its cost in comparisons, and its memory. What it evicts: test_eviction.py."""

import random

from ragcachekit.store.eviction import Access, EvictionPolicy, Ranking


class Given(EvictionPolicy):
    """A policy whose numbers the test chooses: ``weight`` is the priority."""

    def accessed(self, record, access, now):
        record.priority = access.weight


class Counted(float):
    """A number that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other):
        Counted.comparisons += 1
        return float(self) < float(other)

    def __eq__(self, other):
        Counted.comparisons += 1
        return float(self) == float(other)

    __hash__ = float.__hash__


def work(size, rounds=2000):
    """Comparisons per operation in a tier of ``size`` entries with holds, touches, misses and evictions."""
    ranking, draw = Ranking(Given()), random.Random(size)
    for item in range(size):
        ranking.add(item, 1, access=Access(weight=Counted(draw.random())))
    Counted.comparisons = 0
    for number in range(rounds):
        item = draw.randrange(size)
        ranking.hold(item)
        ranking.touch(draw.randrange(size), Access(weight=Counted(draw.random())))
        ranking.evict()
        ranking.release(item)
        new = Access(weight=Counted(draw.random()))
        ranking.add(size + number, 1, access=new)
    return Counted.comparisons / (5 * rounds)


def test_an_operation_is_logarithmic_in_comparisons():
    """Doubling the entries eight times adds a constant each time; linear work would be 256-fold."""
    small, large = work(128), work(32768)
    assert large < 3 * small
    assert large < 8 * 15, "log2(32768) is 15"


def test_what_was_known_survives_eviction_for_a_while_but_not_removal():
    ranking = Ranking(_Counting())
    for item in range(6000):
        ranking.add(item, 1)
        ranking.touch(item)
        ranking.evict()
    ranking.add(5999, 1)
    ranking.add(0, 1)
    assert (ranking.record(5999).priority, ranking.record(0).priority) == (3, 1), "4,096 are remembered"
    ranking.remove(5999)
    ranking.add(5999, 1)
    assert ranking.record(5999).priority == 1


class _Counting(Given):
    def accessed(self, record, access, now):
        record.frequency += 1
        record.priority = record.frequency
