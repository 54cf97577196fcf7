"""The memory of the ranking. What it evicts: test_eviction.py."""

from ragcachekit.store.eviction import EvictionPolicy, Ranking


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


class _Counting(EvictionPolicy):
    def accessed(self, record, access, now):
        record.frequency += 1
        record.priority = record.frequency
