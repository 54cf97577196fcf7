"""By how useful the uses were (Cache-Craft section 3.3)."""

from __future__ import annotations

import math

from ragcachekit.store.eviction.base import Access, EvictionPolicy, Record

HALF_LIFE = 1000


class FrequencyReuse(EvictionPolicy):
    """The entry with the lowest f_r is evicted first; every use adds its weight, 1 / max(CCI (1 - β'), 0.05).

    f_r halves in ``half_life`` accesses of the tier, where the paper lets it grow for ever. All entries
    shrink by the same factor: ranking by log2(f_r) + last access / half_life needs no update of the others.
    """

    def __init__(self, half_life: int = HALF_LIFE) -> None:
        if half_life < 1:
            raise ValueError(f"the half-life of f_r must be at least 1 access, got {half_life}")
        self._half_life = half_life

    def accessed(self, record: Record, access: Access, now: int) -> None:
        record.frequency += access.times
        aged = record.weight * 0.5 ** ((now - record.at) / self._half_life)
        record.weight = aged + access.times * access.weight
        if record.weight > 0:
            record.priority = math.log2(record.weight) + now / self._half_life
        else:
            record.priority = -math.inf
