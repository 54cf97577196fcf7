"""Eviction policies against plain re-derivations that look at every entry and at the whole past."""

import math
import random

import pytest

from ragcachekit.store.eviction import Access, FrequencyReuse, Gdsf, Lfu, Lru, Pgdsf, Ranking, open_eviction
from soak_kit import soaked

ITEMS = "abcdefghijkl"
GROUPS = ("acme", "globex")


class Oracle:
    """A tier as lists: every access is written down, every priority is worked out from what is written.

    ``score(past, now, clock)`` gets an item's accesses as ``(number, access, clock then)``.
    """

    def __init__(self, score):
        self.score, self.past, self.live, self.holds = score, {}, {}, {}
        self.now, self.clock, self.known = 0, 0.0, []

    def access(self, item, access):
        self.now += 1
        if not access.hit and access.seconds and access.new_tokens:
            self.known.append(access.seconds / access.new_tokens)
        mine = self.past.setdefault(item, [])
        mine.append((self.now, access))
        self.live[item]["clock"] = self.clock
        self.live[item]["priority"] = self.score(self, mine)

    def add(self, item, size, group, access):
        self.live[item] = {"size": size, "group": group}
        self.access(item, access)

    def remove(self, item):
        for table in (self.past, self.live, self.holds):
            table.pop(item, None)

    def lowest(self, group=None):
        free = [
            i
            for i, e in self.live.items()
            if not self.holds.get(i) and (group is None or e["group"] == group)
        ]
        return min(free, key=lambda i: (self.live[i]["priority"], self.past[i][-1][0]), default=None)

    def evict(self, group=None):
        item = self.lowest(group)
        if item is not None:
            self.clock = max(self.clock, self.live.pop(item)["priority"])
        return item


def lru(oracle, past):
    return past[-1][0]


def since_it_came(past):
    """Accesses from the last miss on."""
    hits = [access.hit for _, access in past]
    return len(past) - max((at for at, hit in enumerate(hits) if not hit), default=0)


def lfu(oracle, past):
    return since_it_came(past)


def windowed(oracle, past, window):
    """This bucket's accesses, and those of the one before by the share that the window still covers."""
    bucket = oracle.now // window
    share = 1 - (oracle.now - bucket * window) / window
    numbers = [number // window for number, _ in past]
    return numbers.count(bucket) + share * numbers.count(bucket - 1)


def gdsf(oracle, past):
    return oracle.clock + since_it_came(past)


def cost(oracle, past):
    mine = [a.seconds / a.new_tokens for _, a in past if not a.hit and a.seconds and a.new_tokens]
    if not oracle.known:
        return 1.0
    costs = mine or oracle.known
    return sum(costs) / len(costs) / oracle.known[0]


def pgdsf(oracle, past):
    """The window is longer than the test."""
    return oracle.clock + len(past) * cost(oracle, past)


def pgdsf_windowed(oracle, past):
    return oracle.clock + windowed(oracle, past, 25) * cost(oracle, past)


def f_r(oracle, past):
    """Each use's worth, halved every 40 accesses since; in the form that compares over time."""
    weight = sum(a.weight * 0.5 ** ((oracle.now - number) / 40) for number, a in past)
    return math.log2(weight) + oracle.now / 40


CASES = {
    "lru": (Lru, lru),
    "lfu": (Lfu, lfu),
    "lfu:25": (lambda: Lfu(25), lambda o, p: windowed(o, p, 25)),
    "gdsf": (Gdsf, gdsf),
    "gdsf:25": (lambda: Gdsf(25), lambda o, p: o.clock + windowed(o, p, 25)),
    "pgdsf": (Pgdsf, pgdsf),
    "pgdsf:25": (lambda: Pgdsf(25), pgdsf_windowed),
    "pgdsf, forgetting": (
        lambda: Pgdsf(None),
        lambda o, p: o.clock + since_it_came(p) * cost(o, p),
    ),
    "f_r:40": (lambda: FrequencyReuse(40), f_r),
}


def some_access(draw):
    if draw.random() < 0.5:
        return Access(weight=draw.uniform(0.5, 20))
    known = draw.random() < 0.8
    return Access(
        hit=False,
        seconds=draw.uniform(0.1, 5) if known else 0.0,
        new_tokens=draw.randint(1, 900) if known else 0,
        weight=draw.uniform(0.5, 20),
    )


@pytest.mark.parametrize("seed", soaked(range(2), 0))
@pytest.mark.parametrize("case", CASES)
def test_any_sequence_evicts_whom_the_definition_says(case, seed):
    make, score = CASES[case]
    ranking, oracle = Ranking(make()), Oracle(score)
    draw = random.Random(seed)
    left = 0
    for _ in range(700):
        step, item = draw.random(), draw.choice(ITEMS)
        if step < 0.3:
            size, group, access = draw.randint(1, 9), draw.choice(GROUPS), some_access(draw)
            ranking.add(item, size, group, access)
            oracle.add(item, size, group, access)
        elif step < 0.6:
            access = some_access(draw)
            ranking.touch(item, access)
            if item in oracle.live:
                oracle.access(item, access)
        elif step < 0.64:
            ranking.remove(item)
            oracle.remove(item)
        elif step < 0.74 and item in oracle.live:
            ranking.hold(item)
            oracle.holds[item] = oracle.holds.get(item, 0) + 1
        elif step < 0.88:
            ranking.release(item)
            oracle.holds[item] = max(0, oracle.holds.get(item, 0) - 1)
        elif step >= 0.88:
            group = draw.choice((None, *GROUPS))
            expected = oracle.evict(group)
            assert ranking.evict(group) == expected
            left += expected is not None
        agree(ranking, oracle)
    assert left > 50
    ranking.clear()
    agree(ranking, Oracle(score))


def agree(ranking, oracle):
    assert set(ranking) == set(oracle.live)
    assert len(ranking) == len(oracle.live)
    for group in (None, *GROUPS):
        assert ranking.lowest(group) == oracle.lowest(group)
    for group in GROUPS:
        mine = [entry["size"] for entry in oracle.live.values() if entry["group"] == group]
        assert ranking.nbytes_of(group) == sum(mine)
    assert ranking.nbytes == sum(entry["size"] for entry in oracle.live.values())
    for item, facts in oracle.live.items():
        record = ranking.record(item)
        assert item in ranking
        assert record.priority == pytest.approx(facts["priority"], rel=1e-9)
        assert (record.nbytes, record.group) == (facts["size"], facts["group"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mru", "unknown eviction policy 'mru'; known: lru, lfu, gdsf, pgdsf, f_r"),
        ("lru:5", "takes no number"),
        ("pgdsf:x", "no whole number"),
        ("pgdsf:", "no whole number"),
        ("pgdsf:0", "at least 1"),
        ("f_r:60s", "whole number"),
    ],
)
def test_what_cannot_be_opened_says_what_to_write(name, says):
    with pytest.raises(ValueError, match=says):
        open_eviction(name)
