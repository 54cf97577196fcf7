"""The ranking itself: any sequence against a dict, its cost in comparisons, and its memory."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ragcachekit.store.eviction import Access, EvictionPolicy, Ranking, Record

items = st.sampled_from("abcdefg")
groups = st.sampled_from(["", "acme", "globex"])


class Given(EvictionPolicy):
    """A policy whose numbers the test chooses: ``weight`` is the priority."""

    def __init__(self):
        self.left = []

    def accessed(self, record: Record, access: Access, now: int) -> None:
        record.priority = access.weight

    def evicted(self, record: Record) -> None:
        self.left.append(record)


class RankingMachine(RuleBasedStateMachine):
    """``self.model``: item -> [priority, number of last access, bytes, group, holds]."""

    def __init__(self):
        super().__init__()
        self.policy = Given()
        self.ranking = Ranking(self.policy)
        self.model, self.now, self.left = {}, 0, 0

    @rule(item=items, priority=st.integers(0, 5), nbytes=st.integers(0, 9), group=groups)
    def add(self, item, priority, nbytes, group):
        self.ranking.add(item, nbytes, group=group, access=Access(weight=priority))
        self.now += 1
        holds = self.model[item][4] if item in self.model else 0
        self.model[item] = [priority, self.now, nbytes, group, holds]

    @rule(item=items, priority=st.integers(0, 5))
    def touch(self, item, priority):
        self.ranking.touch(item, Access(weight=priority))
        if item in self.model:
            self.now += 1
            self.model[item][:2] = [priority, self.now]

    @rule(item=items)
    def remove(self, item):
        self.ranking.remove(item)
        self.model.pop(item, None)

    @rule(item=items)
    def hold(self, item):
        self.ranking.hold(item)
        if item in self.model:
            self.model[item][4] += 1

    @rule(item=items)
    def release(self, item):
        self.ranking.release(item)
        if item in self.model:
            self.model[item][4] = max(0, self.model[item][4] - 1)

    @rule(group=st.one_of(st.none(), groups))
    def evict(self, group):
        expected = self.expected(group)
        assert self.ranking.evict(group) == expected
        if expected is not None:
            self.left += 1
            assert self.policy.left[-1].priority == self.model.pop(expected)[0]

    @precondition(lambda self: len(self.model) > 5)
    @rule()
    def clear(self):
        self.ranking.clear()
        self.model.clear()

    def expected(self, group):
        free = [(*e[:2], i) for i, e in self.model.items() if not e[4] and group in (None, e[3])]
        return min(free)[2] if free else None

    @invariant()
    def agrees(self):
        assert set(self.ranking) == set(self.model)
        assert len(self.ranking) == len(self.model)
        assert self.ranking.nbytes == sum(e[2] for e in self.model.values())
        for group in (None, "", "acme", "globex"):
            assert self.ranking.lowest(group) == self.expected(group)
            if group is not None:
                assert self.ranking.nbytes_of(group) == sum(
                    e[2] for e in self.model.values() if e[3] == group
                )
        for item, entry in self.model.items():
            assert item in self.ranking
            record = self.ranking.record(item)
            assert (record.priority, record.nbytes, record.group) == (entry[0], entry[2], entry[3])
        assert len(self.policy.left) == self.left


RankingMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestRankingMachine = RankingMachine.TestCase


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


def test_neither_touches_nor_holds_let_it_grow():
    """The lowest is found among few outdated ones, however often the others were used."""
    ranking = Ranking(Given())
    for item in range(20):
        ranking.add(item, 1, access=Access(weight=Counted(9)))
    for number in range(20_000):
        ranking.touch(number % 20, Access(weight=Counted(9)))
        ranking.hold(number % 20)
        ranking.release(number % 20)
        ranking.add("passing", 1, access=Access(weight=Counted(9)))
        ranking.remove("passing")
    Counted.comparisons = 0
    assert ranking.lowest() == 0
    assert Counted.comparisons < 500


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
