"""Rows into a request's KV: exactly they, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import DeviceRows, KVTable, Rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 50


@pytest.fixture(params=["torch", "triton"])
def path(request, monkeypatch):
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", request.param)
    return request.param


def nan(*shape, dtype):
    return torch.full(shape, float("nan"), device=DEVICE).to(dtype)


def rows_of(seed, heads, rows, dim, dtype, order):
    """``[heads, rows, dim]`` as projections leave it: some other order of the dimensions in memory."""
    shape = [(heads, rows, dim)[i] for i in order]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)
    return x.permute([order.index(i) for i in range(3)])


def assert_written(into, rows, positions):
    assert torch.equal(into[:, positions], rows)
    others = [p for p in range(into.shape[1]) if p not in positions]
    assert bool(into[:, others].isnan().all())


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_rows_lie_at_their_positions(path, data):
    positions = sorted(data.draw(st.sets(st.integers(0, SLOTS - 1), max_size=40)))
    heads, dim, wide = (data.draw(st.integers(1, high)) for high in (5, 40, 40))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    order = data.draw(st.permutations(range(3)))
    key, value = (rows_of(i, heads, len(positions), d, dtype, order) for i, d in enumerate((dim, wide)))
    into_key = nan(2 * heads, SLOTS, dim, dtype=dtype)[::2]
    into_value = nan(heads, SLOTS, wide, dtype=dtype)
    dispatch.scatter(key, value, into_key, into_value, Rows(tuple(positions)) if dim % 2 else positions)
    assert_written(into_key, key, positions)
    assert_written(into_value, value, positions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_through_a_table_only_as_many_rows_as_are_counted(monkeypatch, dtype, count):
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")
    pytest.importorskip("triton")
    positions = [2, 3, 11, 12, 13, 30, 41, 49]
    key, value = rows_of(1, 3, 8, 16, dtype, (1, 0, 2)), rows_of(2, 3, 8, 32, dtype, (1, 0, 2))
    into = [(nan(3, SLOTS, 16, dtype=dtype), nan(3, SLOTS, 32, dtype=dtype)) for _ in range(3)]
    entries = [[k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0)] for k, v in into]
    padded = positions[:count] + [positions[count - 1]] * (8 - count)
    rows = DeviceRows(
        torch.tensor(padded, dtype=torch.int32, device=DEVICE),
        torch.tensor([count], dtype=torch.int32, device=DEVICE),
    )
    key[:, count:], value[:, count:] = float("inf"), float("inf")
    dispatch.scatter_at(key, value, KVTable(torch.tensor(entries, device=DEVICE), dtype), 1, rows)
    assert_written(into[1][0], key[:, :count], positions[:count])
    assert_written(into[1][1], value[:, :count], positions[:count])
    assert all(bool(x.isnan().all()) for layer in (0, 2) for x in into[layer])


class TestBadInput:
    def scatter(self, positions, rows=2, slots=SLOTS, heads=2):
        x, into = torch.zeros(2, rows, 4, device=DEVICE), torch.zeros(heads, slots, 4, device=DEVICE)
        dispatch.scatter(x, x, into, into.clone(), positions)
        return into

    def test_a_good_one_is_taken(self):
        assert self.scatter([0, SLOTS - 1]).shape == (2, SLOTS, 4)

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"positions": [1]}, "1 positions"),
            ({"positions": [4, 4]}, "ascending"),
            ({"positions": [4, SLOTS]}, "outside"),
            ({"positions": [4, 5], "heads": 3}, "heads"),
        ],
    )
    def test_says_what_does_not_fit(self, path, arguments, says):
        with pytest.raises(ValueError, match=says):
            self.scatter(**arguments)

    def test_a_table_needs_as_many_rows_as_there_is_room_for(self):
        x = torch.zeros(2, 3, 4)
        rows = DeviceRows(torch.zeros(4, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
        with pytest.raises(ValueError, match="room for 4"):
            dispatch.scatter_at(x, x, KVTable(torch.zeros(1, 4, dtype=torch.int64), x.dtype), 0, rows)
