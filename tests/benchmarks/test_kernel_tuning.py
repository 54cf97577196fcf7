"""The tuner of the attention kernel: the fastest candidate wins, unless it is wrong."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernels import tuning
from ragcachekit_kernels.attention import configs, row_attention
from ragcachekit_kernels.attention.configs import Config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = tuning.Shape(4, 2, 16, 64, range(0, 64, 7), torch.float32, value_dim=32, window=40)
ONE, TWO, THREE = Config(32, 16, 4, 1), Config(16, 16, 4, 1), Config(16, 32, 4, 1)


def test_the_fastest_wins():
    times = iter([3.0, 1.0, 2.0])
    tuned = tuning.fastest(SHAPE, DEVICE, [ONE, TWO, THREE], lambda call: next(times))
    assert tuned.best == TWO
    assert [t.milliseconds for t in tuned.tried] == [3.0, 1.0, 2.0]
    assert all(t.error < 1e-5 for t in tuned.tried)


@pytest.mark.parametrize("table", [False, True])
def test_a_wrong_one_is_refused_however_fast(table, monkeypatch):
    name = "attention_at" if table else "attention"
    right = getattr(row_attention, name)

    def sometimes_wrong(*args, config, **options):
        out = right(*args, config=config, **options)
        if config == ONE:
            out[1, 3] += 1e-3
        if config == TWO:
            out[0, 0] = float("nan")
        return out

    monkeypatch.setattr(row_attention, name, sometimes_wrong)
    tuned = tuning.fastest(SHAPE, DEVICE, [ONE, TWO, THREE], lambda call: 1.0, table=table)
    assert tuned.best == THREE
    assert [t.refused for t in tuned.tried] == ["differs from float64"] * 2 + [None]
    with pytest.raises(ValueError, match=r"no candidate .* differs from float64"):
        tuning.fastest(SHAPE, DEVICE, [ONE, TWO], lambda call: 1.0, table=table)


def test_one_that_cannot_be_launched_is_no_candidate(monkeypatch):
    right = row_attention.attention

    def too_large(*args, config, **options):
        if config == ONE:
            raise RuntimeError("out of shared memory")
        return right(*args, config=config, **options)

    monkeypatch.setattr(row_attention, "attention", too_large)
    tuned = tuning.fastest(SHAPE, DEVICE, [ONE, TWO], lambda call: 1.0)
    assert tuned.best == TWO
    assert tuned.tried[0].refused == "RuntimeError: out of shared memory"


def test_the_library_reads_what_was_found():
    tuned = tuning.fastest(SHAPE, DEVICE, [TWO], lambda call: 1.0)
    ((key, config),) = configs.loads(tuning.file_of([tuned])).items()
    assert key.endswith("/float32/16/32/pointers/masked")
    assert config == TWO


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_candidates_are_many_and_differ(dtype, table):
    found = tuning.candidates(dtype, table=table)
    assert len(set(found)) == len(found) >= 5
    assert not (table and any(c.descriptors for c in found))
