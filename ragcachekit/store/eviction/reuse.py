"""By how useful the uses were (Cache-Craft section 3.3)."""

from __future__ import annotations

import math

from ragcachekit.store.eviction.base import Access, Record

HALF_LIFE = 1000


class FrequencyReuse:
    """The entry with the lowest f_r leaves first; every use adds its worth, 1 / max(CCI (1 - β'), 0.05).

    f_r halves in ``half_life`` accesses of the tier (the paper lets it grow for ever; then what was
    popular once stays for good). All entries shrink by the same factor, so their order changes only by
    accesses: ranking by log2(f_r) + last access / half_life keeps it without touching the others.

    Parameters
    ----------
    half_life : int
        In accesses of the tier.
    """

    name = "f_r"

    def __init__(self, half_life: int = HALF_LIFE) -> None:
        if half_life < 1:
            raise ValueError(f"the half-life of f_r must be at least 1 access, got {half_life}")
        self._half_life = half_life

    def accessed(self, record: Record, access: Access, now: int) -> None:
        """Age what there is and add the use's worth."""
        record.frequency += access.times
        aged = record.weight * 0.5 ** ((now - record.at) / self._half_life)
        record.weight = aged + access.times * access.weight
        if record.weight > 0:
            record.priority = math.log2(record.weight) + now / self._half_life
        else:
            record.priority = -math.inf

    def evicted(self, record: Record) -> None:
        """Nothing to learn."""
