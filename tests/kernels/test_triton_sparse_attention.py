"""The sparse-row attention kernel, interpreted on a CPU or compiled on a GPU, against a float64 loop."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcachekit_kernels import dispatch
from ragcachekit_kernels.attention.configs import Config
from ragcachekit_kernels.backend import SETTING
from ragcachekit_kernels.options import AttentionOptions
from ragcachekit_kernels.rows import DeviceRows, KVTable, Rows

pytest.importorskip("triton")
NAN = float("nan")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POINTERS = Config(32, 16, 4, 1)
DESCRIPTORS = Config(32, 16, 4, 1, descriptors=True)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    monkeypatch.setenv(SETTING, "triton")


def by_row(query, key, value, positions, *, scale, window=None, softcap=None, sinks=None):
    """One row and head at a time over exactly the keys it sees: nothing is masked."""
    query, key, value = (t.detach().cpu().double() for t in (query, key, value))
    groups = query.shape[0] // key.shape[0]
    out = torch.zeros(query.shape[0], len(positions), value.shape[-1], dtype=torch.float64)
    for head in range(query.shape[0]):
        for row, position in enumerate(positions):
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            scores = key[head // groups, seen] @ query[head, row] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            logits = scores if sinks is None else torch.cat((scores, sinks[head].cpu().double()[None]))
            out[head, row] = (scores - logits.logsumexp(0)).exp() @ value[head // groups, seen]
    return out


def drawn(kv_heads, groups, tokens, width, value_width, rows, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype).to(DEVICE)

    return (
        tensor(kv_heads * groups, rows, width),
        tensor(kv_heads, tokens, width),
        tensor(kv_heads, tokens, value_width),
    )


def separated(options):
    """Options of attention, and those of the launch."""
    names = {"scale", "window", "softcap", "sinks"}
    own = AttentionOptions(**{name: options[name] for name in names & options.keys()})
    return own, {name: options[name] for name in options.keys() - names}


def launched(query, key, value, positions, **options):
    """Past dispatch, where configs and splits can be given."""
    from ragcachekit_kernels.attention import row_attention

    own, launch = separated(options)
    rows = Rows(tuple(positions)).on(DEVICE)
    return row_attention.attention(query, key, value, rows, own, **launch)


def at_addresses(query, key, value, rows, **options):
    from ragcachekit_kernels.attention import row_attention

    entry = [key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0)]
    other = [16, 16, 0, 0]
    table = KVTable(torch.tensor([other, entry, other], device=DEVICE), key.dtype)
    own, launch = separated(options)
    return row_attention.attention_at(
        query, table, 1, key.shape[0], value.shape[-1], rows, own, tokens=key.shape[1], **launch
    )


def assert_right(ours, query, key, value, positions, **options):
    out = by_row(query, key, value, positions, **options)
    tolerance = TOLERANCE[query.dtype]
    assert ours.dtype == query.dtype
    torch.testing.assert_close(ours.cpu().double(), out, rtol=tolerance, atol=tolerance)


def sinks_of(query, dtype=torch.float32):
    return torch.linspace(-2, 3, query.shape[0]).to(dtype).to(DEVICE)


@st.composite
def cases(draw):
    tokens = draw(st.integers(1, 120))
    one = st.integers(0, tokens - 1)
    picked = st.lists(one, min_size=1, max_size=12, unique=True).map(sorted)
    tail = one.map(lambda start: list(range(max(start, tokens - 40), tokens)))
    return {
        "sizes": (draw(st.integers(1, 3)), draw(st.integers(1, 8)), tokens),
        "widths": (draw(st.sampled_from([1, 5, 16, 24])), draw(st.sampled_from([3, 16, 20]))),
        "positions": draw(st.one_of(picked, tail)),
        "window": draw(st.one_of(st.none(), st.integers(1, tokens + 5))),
        "softcap": draw(st.sampled_from([None, 0.5, 30.0])),
        "sinks": draw(st.booleans()),
        "splits": draw(st.sampled_from([1, 1, 2, 5])),
        "config": draw(st.sampled_from([POINTERS, DESCRIPTORS, Config(16, 32, 4, 1, resident=0)])),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=20, deadline=None, derandomize=True)
@given(case=cases())
def test_any_shape_against_the_float64_loop(case):
    positions = case["positions"]
    query, key, value = drawn(*case["sizes"], *case["widths"], len(positions), case["seed"])
    options = {
        "scale": case["widths"][0] ** -0.5,
        "window": case["window"],
        "softcap": case["softcap"],
        "sinks": sinks_of(query) if case["sinks"] else None,
    }
    ours = launched(query, key, value, positions, config=case["config"], splits=case["splits"], **options)
    assert ours.shape == (query.shape[0], len(positions), value.shape[-1])
    assert_right(ours, query, key, value, positions, **options)


@pytest.mark.parametrize("groups", range(1, 9))
def test_every_group_size(groups):
    positions = [0, 3, 4, 50, 51, 99]
    query, key, value = drawn(2, groups, 100, 16, 16, len(positions))
    ours = dispatch.sparse_attention(query, key, value, positions, AttentionOptions(scale=0.3, window=33))
    assert_right(ours, query, key, value, positions, scale=0.3, window=33)


@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 192, 256])
def test_every_head_dim(width):
    query, key, value = drawn(1, 2, 40, width, 64, 3)
    ours = dispatch.sparse_attention(query, key, value, [7, 20, 39], AttentionOptions(scale=width**-0.5))
    assert_right(ours, query, key, value, [7, 20, 39], scale=width**-0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 3])
def test_half_precision_keeps_its_type_and_sums_in_float32(dtype, splits):
    positions = list(range(30, 80, 5))
    query, key, value = drawn(2, 2, 80, 32, 16, len(positions), dtype=dtype)
    options = {"scale": 0.18, "sinks": sinks_of(query, dtype)}
    ours = launched(query, key, value, positions, splits=splits, **options)
    assert_right(ours, query, key, value, positions, **options)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40])
def test_windows_around_the_size_of_a_block(window):
    positions = [0, 1, 14, 15, 16, 17, 30, 31, 32, 33, 63, 64, 79]
    query, key, value = drawn(1, 3, 80, 16, 16, len(positions))
    for config in (POINTERS, DESCRIPTORS):
        ours = launched(query, key, value, positions, scale=0.3, window=window, config=config)
        assert_right(ours, query, key, value, positions, scale=0.3, window=window)


@pytest.mark.parametrize("rows", [15, 16, 17, 33])
def test_around_the_size_of_a_tile(rows):
    positions = [2 * i + 1 for i in range(rows)]
    query, key, value = drawn(2, 2, positions[-1] + 3, 16, 16, rows)
    ours = dispatch.sparse_attention(query, key, value, positions, AttentionOptions(scale=0.5))
    assert_right(ours, query, key, value, positions, scale=0.5)


@pytest.mark.parametrize("splits", [2, 7])
def test_splits_do_not_change_the_result(splits):
    positions = [0, 5, 40, 41, 90]
    query, key, value = drawn(2, 3, 91, 16, 24, 5)
    options = {"scale": 0.4, "sinks": sinks_of(query)}
    whole = launched(query, key, value, positions, splits=1, **options)
    parts = launched(query, key, value, positions, splits=splits, **options)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
    assert_right(parts, query, key, value, positions, **options)


def test_a_split_in_which_a_row_sees_nothing():
    query, key, value = drawn(1, 1, 80, 16, 16, 2)
    ours = launched(query, key, value, [3, 79], scale=0.3, window=5, splits=4)
    assert_right(ours, query, key, value, [3, 79], scale=0.3, window=5)


class TestPoison:
    """NaN in what no row of a tile may see reaches nothing."""

    @pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS])
    @pytest.mark.parametrize("window", [None, 20])
    def test_keys_after_the_last_position_and_before_the_window(self, config, window):
        positions = [40, 41, 57]
        query, key, value = drawn(2, 2, 120, 16, 16, 3)
        options = {"scale": 0.3, "window": window, "config": config, "splits": 2}
        want = launched(query, key, value, positions, **options)
        key[:, 58:], value[:, 58:] = NAN, NAN
        if window:
            key[:, : 41 - window], value[:, : 41 - window] = NAN, NAN
        ours = launched(query, key, value, positions, **options)
        assert torch.equal(ours, want)

    def test_keys_between_the_rows_of_a_tile_are_masked(self):
        query, key, value = drawn(1, 2, 30, 16, 16, 2)
        want = dispatch.sparse_attention(query, key, value, [10, 20], AttentionOptions(scale=0.3))
        key[:, 15] = NAN
        ours = dispatch.sparse_attention(query, key, value, [10, 20], AttentionOptions(scale=0.3))
        assert torch.equal(ours[:, 0], want[:, 0])
        assert ours[:, 1].isnan().all()

    def test_other_heads_and_the_memory_around_views(self):
        positions = [9, 33]
        query, key, value = drawn(3, 2, 50, 16, 16, 2)
        wide_key = torch.full((3, 70, 16), NAN, device=DEVICE)
        wide_value = torch.full((3, 60, 16), NAN, device=DEVICE)
        wide_key[:, 10:44], wide_value[:, 20:54] = key[:, :34], value[:, :34]
        wide_query = torch.full((2, 6, 32), NAN, device=DEVICE)  # token-major, as transformers hands it
        wide_query[..., :16] = query.transpose(0, 1)
        view = wide_query[..., :16].transpose(0, 1)
        ours = dispatch.sparse_attention(
            view, wide_key[:, 10:], wide_value[:, 20:], positions, AttentionOptions(scale=0.3)
        )
        want = dispatch.sparse_attention(query, key, value, positions, AttentionOptions(scale=0.3))
        assert torch.equal(ours, want)

    @pytest.mark.parametrize("splits", [1, 3])
    def test_rows_from_the_count_on(self, splits):
        positions, room = [2, 30, 59], 9
        query, key, value = drawn(2, 3, 80, 16, 16, room)
        key[:, 60:], value[:, 60:], query[:, 3:] = NAN, NAN, NAN
        where = torch.tensor(positions + [75] * (room - 3), dtype=torch.int32, device=DEVICE)
        rows = DeviceRows(where, torch.tensor([3], dtype=torch.int32, device=DEVICE))
        ours = at_addresses(query, key, value, rows, scale=0.3, splits=splits)
        assert_right(ours[:, :3], query[:, :3], key, value, positions, scale=0.3)
        assert (ours[:, 3:] == 0).all()

    @pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # tanh is 1 there, as it should be
    def test_large_scores_do_not_overflow(self):
        query, key, value = drawn(1, 1, 30, 16, 16, 2)
        sinks = torch.tensor([1e5], device=DEVICE)
        for options in ({}, {"sinks": sinks}, {"softcap": 50.0}):
            ours = dispatch.sparse_attention(
                query * 1e4, key * 1e4, value, [10, 29], AttentionOptions(scale=1.0, **options)
            )
            assert torch.isfinite(ours).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_table_gives_what_pointers_give_bit_for_bit(dtype, splits):
    positions = [0, 17, 18, 66]
    query, key, value = drawn(2, 3, 70, 32, 16, 4, dtype=dtype)
    wide = torch.empty(2, 90, 32, dtype=dtype, device=DEVICE)
    wide[:, :70] = key
    options = {"scale": 0.2, "window": 30, "splits": splits, "config": POINTERS}
    want = launched(query, key, value, positions, **options)
    ours = at_addresses(query, wide[:, :70], value, Rows(tuple(positions)).on(DEVICE), **options)
    again = launched(query, key, value, positions, **options)
    assert torch.equal(want, ours)
    assert torch.equal(want, again)


def test_through_dispatch_by_table():
    positions = [4, 30]
    query, key, value = drawn(2, 2, 40, 16, 16, 2)
    entry = [key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0)]
    table = KVTable(torch.tensor([entry], device=DEVICE), key.dtype)
    rows = Rows(tuple(positions)).on(DEVICE)
    ours = dispatch.sparse_attention_at(
        query, table, 0, 2, 16, rows, AttentionOptions(scale=0.3, softcap=5.0), tokens=40
    )
    want = by_row(query, key, value, positions, scale=0.3, softcap=5.0)
    torch.testing.assert_close(ours.cpu().double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("room", [9, 300])
def test_rows_past_the_count_leave_a_captured_attention_as_zeros(monkeypatch, room):
    """Memory that was used before is full of NaN here."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *size, **kind: nan_filled(empty(*size, **kind)))
    query, key, value = drawn(2, 2, 40, 16, 16, room)
    entry = [key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0)]
    table = KVTable(torch.tensor([entry], device=DEVICE), key.dtype)
    where = torch.tensor([4, 30] + [30] * (room - 2), dtype=torch.int32, device=DEVICE)
    rows = DeviceRows(where, torch.tensor([2], dtype=torch.int32, device=DEVICE))
    out = dispatch.sparse_attention_at(query, table, 0, 2, 16, rows, AttentionOptions(scale=0.3), tokens=40)
    assert (out[:, 2:] == 0).all()
    want = by_row(query[:, :2], key, value, [4, 30], scale=0.3)
    torch.testing.assert_close(out[:, :2].cpu().double(), want, rtol=2e-5, atol=2e-5)


def nan_filled(memory):
    return memory.fill_(NAN) if memory.is_floating_point() else memory


class TestChoice:
    def test_what_goes_to_triton(self):
        query, key, value = drawn(1, 1, 8, 16, 16, 1)
        assert dispatch.attention_choice(query, key, value) == "triton"

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda q, k, v: (q.double(), k.double(), v.double()), "torch: float64 over float64"),
            (lambda q, k, v: (q.bfloat16(), k, v), "torch: bfloat16 over float32"),
            (lambda q, k, v: (q, k, v.repeat(1, 1, 17)), "torch: head_dim 272 is more than 256"),
            (lambda q, k, v: (q.requires_grad_(), k, v), "torch: gradients are asked for"),
            (lambda q, k, v: (q, k.transpose(1, 2).contiguous().transpose(1, 2), v), "not contiguous"),
        ],
    )
    def test_why_not(self, change, reason):
        tensors = change(*drawn(1, 1, 8, 16, 16, 1))
        assert reason in dispatch.attention_choice(*tensors)

    def test_the_fallback_computes(self):
        query, key, value = (t.double() for t in drawn(2, 2, 20, 16, 16, 2))
        sinks = sinks_of(query, torch.float64)
        out = dispatch.sparse_attention(
            query, key, value, [3, 19], AttentionOptions(scale=0.3, window=6, sinks=sinks)
        )
        want = by_row(query, key, value, [3, 19], scale=0.3, window=6, sinks=sinks)
        torch.testing.assert_close(out.cpu(), want, rtol=1e-12, atol=1e-12)

    def test_torch_when_told_so(self, monkeypatch):
        monkeypatch.setenv(SETTING, "torch")
        query, key, value = drawn(1, 1, 8, 16, 16, 1)
        assert dispatch.attention_choice(query, key, value) == "torch"
        rows, table = Rows((3,)).on(DEVICE), KVTable(torch.zeros(1, 4), torch.float32)
        with pytest.raises(ValueError, match="needs Triton"):
            dispatch.sparse_attention_at(query, table, 0, 1, 16, rows, AttentionOptions(scale=1.0), tokens=8)

    def test_no_rows(self):
        query, key, value = drawn(2, 2, 10, 16, 5, 0)
        out = dispatch.sparse_attention(query, key, value, [], AttentionOptions(scale=0.3))
        assert out.shape == (4, 0, 5)

    @pytest.mark.parametrize("wrong", [{"scale": -1.0}, {"window": 0}, {"softcap": 0.0}])
    def test_refused(self, wrong):
        query, key, value = drawn(1, 1, 8, 16, 16, 1)
        with pytest.raises(ValueError, match="must be positive"):
            dispatch.sparse_attention(query, key, value, [3], AttentionOptions(**{"scale": 1.0, **wrong}))


@given(items=st.integers(0, 400), programs=st.integers(1, 40))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_item_is_dealt_once(items, programs):
    from ragcachekit_kernels.attention.kernels import _lane, _steps

    lane, steps = _lane.fn, _steps.fn
    dealt = [
        step * programs + lane(step, program, programs)
        for program in range(programs)
        for step in range(steps(items, lane(items // programs, program, programs), programs))
    ]
    assert sorted(dealt) == list(range(items))


@pytest.mark.parametrize("descriptors", [True, False])
def test_positions_on_tile_borders_with_many_programs(descriptors):
    """More tiles than programs: every program takes several, to and fro."""
    positions = list(range(0, 120, 2))
    query, key, value = drawn(2, 2, 120, 16, 16, len(positions))
    config = Config(16, 32, 4, 1, descriptors=descriptors)
    ours = launched(query, key, value, positions, scale=0.3, config=config, splits=1)
    assert_right(ours, query, key, value, positions, scale=0.3)


def test_the_public_function_is_not_hidden_by_a_module_of_its_name():
    import ragcachekit_kernels

    query, key, value = drawn(1, 1, 8, 16, 16, 1)
    ragcachekit_kernels.sparse_attention(query, key, value, [3], AttentionOptions(scale=0.3))
    assert ragcachekit_kernels.sparse_attention is dispatch.sparse_attention


def test_triton_is_not_imported_with_dispatch():
    import subprocess
    import sys

    code = "import sys, ragcachekit_kernels.dispatch; assert 'triton' not in sys.modules, 'triton'"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
