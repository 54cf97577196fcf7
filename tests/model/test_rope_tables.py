"""cos and sin of whole prompts: made once, grown, and never of another prompt's frequencies."""

from __future__ import annotations

import pytest
import torch

from families import LONGROPE_THRESHOLD
from link_kit import described
from placing_kit import CPU, many_kinds
from ragcachekit.model.rope import Rope


@pytest.mark.parametrize(
    ("context", "asked", "sizes"),
    [(512, [10, 500, 512], [512]), (40_000, [10, 2048, 2049, 33_000], [2048, 4096, 40_000])],
)
def test_tables_are_made_once_and_grow(monkeypatch, context, asked, sizes):
    rope = Rope(many_kinds().tables, many_kinds().layers, context)
    made = []
    real = rope.angles
    monkeypatch.setattr(rope, "angles", lambda *args: made.append(args[1]) or real(*args))
    for length in asked:
        turns = rope.turns_on(CPU, length)
        assert rope.turns_on(CPU, length) is turns
        assert len(turns) == 2 * len(rope.tables)
        for number, table in enumerate(rope.tables):
            angles = table.angles(torch.arange(length), length)
            cos, sin = turns[number]
            torch.testing.assert_close(cos[:length], angles.cos * angles.m)
            torch.testing.assert_close(sin[:length], angles.sin * angles.m)
            torch.testing.assert_close(turns[number + len(rope.tables)][1], -sin)
    assert made == sizes


def test_tables_follow_the_length_where_frequencies_do():
    rope = described("phi3-longrope")
    short, long = LONGROPE_THRESHOLD - 1, LONGROPE_THRESHOLD + 1
    for length in (short, long, short, 3, 4 * long, long):
        ((cos, sin),) = rope.turns_on(CPU, length)
        (angles,) = rope.angles(torch.arange(length), length)
        torch.testing.assert_close(cos[:length], angles.cos * angles.m)
        torch.testing.assert_close(sin[:length], angles.sin * angles.m)
    assert rope.turns_on(CPU, short) is rope.turns_on(CPU, short)
