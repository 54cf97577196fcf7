"""Sparse-row attention against a float64 loop that softmaxes one row over exactly the keys it may see.

Once in torch, once through Triton: interpreted on a CPU, compiled on a GPU.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcachekit_kernels import dispatch, in_torch
from ragcachekit_kernels.dispatch import AttentionOptions, Rows, sparse_attention
from soak_kit import soaked

NAN = float("nan")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHARED = [HealthCheck.function_scoped_fixture]
DRAWN = {"deadline": None, "derandomize": True, "suppress_health_check": SHARED}


@pytest.fixture(scope="module")
def torch_alone():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAGCACHEKIT_KERNELS", "torch")
        yield


def by_row(query, key, value, positions, *, scale, window=None, softcap=None, sinks=None):
    """One row and head at a time, in float64, keys sliced: nothing is masked."""
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

    sizes = (kv_heads * groups, rows, width), (kv_heads, tokens, width), (kv_heads, tokens, value_width)
    return tuple(tensor(*size) for size in sizes)


def assert_right(ours, query, key, value, positions, **options):
    want, tolerance = by_row(query, key, value, positions, **options), TOLERANCE[query.dtype]
    assert ours.dtype == query.dtype
    torch.testing.assert_close(ours.cpu().double(), want, rtol=tolerance, atol=tolerance)


def check(query, key, value, positions, **options):
    ours = sparse_attention(query, key, value, positions, AttentionOptions(**options))
    assert ours.shape == (query.shape[0], len(positions), value.shape[-1])
    assert_right(ours, query, key, value, positions, **options)


def sinks_of(query, dtype=torch.float32):
    return torch.linspace(-2, 3, query.shape[0]).to(dtype).to(DEVICE)


@st.composite
def cases(draw, tokens):
    tokens = draw(st.integers(1, tokens))
    one = st.integers(0, tokens - 1)
    picked = st.lists(one, min_size=1, max_size=12, unique=True).map(sorted)
    tail = one.map(lambda start: list(range(max(start, tokens - 150), tokens)))
    return {
        "sizes": (draw(st.integers(1, 3)), draw(st.integers(1, 8)), tokens),
        "widths": (draw(st.sampled_from([1, 5, 16, 24])), draw(st.sampled_from([3, 16, 20]))),
        "positions": draw(st.one_of(picked, tail)),
        "window": draw(st.one_of(st.none(), st.integers(1, tokens + 5))),
        "softcap": draw(st.sampled_from([None, 0.5, 30.0])),
        "sinks": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


def of_case(case):
    query, key, value = drawn(*case["sizes"], *case["widths"], len(case["positions"]), case["seed"])
    options = {"scale": case["widths"][0] ** -0.5, "window": case["window"], "softcap": case["softcap"]}
    return query, key, value, options | {"sinks": sinks_of(query) if case["sinks"] else None}


@settings(max_examples=30, **DRAWN)
@given(case=cases(300))
def test_torch_on_any_shape(torch_alone, case):
    query, key, value, options = of_case(case)
    check(query, key, value, case["positions"], **options)


class TestLaunches:
    """The Triton kernel with configs and splits that small problems would not get."""

    @pytest.mark.parametrize("examples", [5, pytest.param(20, marks=pytest.mark.soak)])
    def test_any_shape(self, triton, examples):
        @settings(max_examples=examples, **DRAWN)
        @given(case=cases(120), splits=st.sampled_from([1, 1, 2, 5]), config=st.integers(0, 2))
        def check(case, splits, config):
            query, key, value, options = of_case(case)
            how = {"config": self.configs()[config], "splits": splits}
            ours = self.launched(query, key, value, case["positions"], options, **how)
            assert_right(ours, query, key, value, case["positions"], **options)

        check()

    @staticmethod
    def configs():
        from ragcachekit_kernels.attention import Config

        pointers, descriptors = Config(32, 16, 4, 1), Config(32, 16, 4, 1, descriptors=True)
        return pointers, descriptors, Config(16, 32, 4, 1, resident=0)

    @staticmethod
    def launched(query, key, value, positions, options, **how):
        from ragcachekit_kernels.attention import attention

        at = Rows(tuple(positions)).on(DEVICE)
        return attention(query, key, value, at, AttentionOptions(**options), **how)

    def test_a_split_in_which_a_row_sees_nothing(self, triton):
        query, key, value = drawn(1, 1, 80, 16, 16, 2)
        options = {"scale": 0.3, "window": 5}
        ours = self.launched(query, key, value, [3, 79], options, splits=4)
        assert_right(ours, query, key, value, [3, 79], **options)

    @pytest.mark.parametrize("config", range(3))
    def test_more_tiles_than_programs(self, triton, config):
        positions = list(range(0, 120, 2))
        query, key, value = drawn(2, 2, 120, 16, 16, len(positions))
        how = {"config": self.configs()[config], "splits": 1}
        ours = self.launched(query, key, value, positions, {"scale": 0.3}, **how)
        assert_right(ours, query, key, value, positions, scale=0.3)

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(items=st.integers(0, 400), programs=st.integers(1, 40))
    def test_every_item_is_dealt_once(self, items, programs):
        kernels = pytest.importorskip("ragcachekit_kernels.attention")
        lane, steps = kernels._lane.fn, kernels._steps.fn
        dealt = [
            step * programs + lane(step, program, programs)
            for program in range(programs)
            for step in range(steps(items, lane(items // programs, program, programs), programs))
        ]
        assert sorted(dealt) == list(range(items))

    def test_few_rows_are_split_until_the_device_is_busy(self):
        splits_for = pytest.importorskip("ragcachekit_kernels.attention").splits_for
        assert splits_for(1, 1, 8, 132, 64) > 8
        assert splits_for(200, 1, 8, 132, 64) == 1
        assert all(splits_for(1, 1, 1, 132, units) <= units for units in range(1, 40))


@pytest.mark.parametrize("width", [80, 128, 256])
def test_every_head_dim(path, width):
    check(*drawn(1, 2, 40, width, 64, 3), [7, 20, 39], scale=width**-0.5)


@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 40])
def test_windows_around_the_size_of_a_block(path, window):
    positions = [0, 1, 14, 15, 16, 17, 30, 31, 32, 33, 63, 64, 79]
    check(*drawn(1, 3, 80, 16, 16, len(positions)), positions, scale=0.3, window=window)


@pytest.mark.parametrize(("rows", "gap"), [(15, 2), (16, 1), (17, 2), (33, 2), (127, 1), (129, 2)])
def test_around_the_size_of_a_tile(path, rows, gap):
    positions = [5 + gap * i for i in range(rows)]
    check(*drawn(1, 2, positions[-1] + 9, 4, 4, rows), positions, scale=0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_type_and_sums_in_float32(path, dtype):
    positions = list(range(30, 80, 5))
    query, key, value = drawn(2, 2, 80, 32, 16, len(positions), dtype=dtype)
    check(query, key, value, positions, scale=0.18, sinks=sinks_of(query, dtype))


@pytest.mark.parametrize(
    ("dtype", "has_sinks"), soaked([(torch.bfloat16, True), (torch.float16, False)], (torch.float16, False))
)
def test_thousands_of_equal_weights_in_half_precision(path, dtype, has_sinks):
    """A sum of weights in 16 bits would stop growing at 256 of them (bfloat16) or 2,048 (float16)."""
    query, value = torch.zeros(2, 2, 16, dtype=dtype), torch.ones(1, 2560, 16, dtype=dtype)
    sinks = torch.full((2,), -30.0, device=DEVICE) if has_sinks else None
    key = drawn(1, 2, 2560, 16, 16, 2, dtype=dtype)[1]
    options = AttentionOptions(scale=1.0, sinks=sinks)
    ours = sparse_attention(query.to(DEVICE), key, value.to(DEVICE), [2500, 2559], options)
    torch.testing.assert_close(ours.float().cpu(), torch.ones(2, 2, 16), rtol=8e-3, atol=0)


class TestPoison:
    """NaN in what no row of a tile may see reaches nothing."""

    @pytest.mark.parametrize("window", [None, 20])
    def test_keys_after_the_last_position_and_before_the_window(self, path, window):
        positions = [40, 41, 57]
        query, key, value = drawn(2, 2, 120, 16, 16, 3)
        options = AttentionOptions(0.3, window)
        want = sparse_attention(query, key, value, positions, options)
        key[:, 58:], value[:, 58:] = NAN, NAN
        if window:
            key[:, : 41 - window], value[:, : 41 - window] = NAN, NAN
        ours = sparse_attention(query, key, value, positions, options)
        assert torch.equal(ours, want)
        assert not ours.isnan().any()

    def test_other_heads_and_the_memory_around_views(self, path):
        positions = [9, 33]
        query, key, value = drawn(3, 2, 50, 16, 16, 2)
        wide_key = torch.full((3, 70, 16), NAN, device=DEVICE)
        wide_value = torch.full((3, 60, 16), NAN, device=DEVICE)
        wide_key[:, 10:44], wide_value[:, 20:54] = key[:, :34], value[:, :34]
        wide_query = torch.full((2, 6, 32), NAN, device=DEVICE)  # token-major, as transformers hands it
        wide_query[..., :16] = query.transpose(0, 1)
        view = wide_query[..., :16].transpose(0, 1)
        ours = sparse_attention(view, wide_key[:, 10:], wide_value[:, 20:], positions, AttentionOptions(0.3))
        want = sparse_attention(query, key, value, positions, AttentionOptions(0.3))
        torch.testing.assert_close(ours, want, rtol=1e-6, atol=1e-6)

    @pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # tanh is 1 there, as it should be
    def test_large_scores_do_not_overflow(self, path):
        query, key, value = drawn(1, 1, 30, 16, 16, 2)
        for options in ({}, {"sinks": torch.tensor([1e5], device=DEVICE)}, {"softcap": 50.0}):
            how = AttentionOptions(1.0, **options)
            assert torch.isfinite(sparse_attention(query * 1e4, key * 1e4, value, [10, 29], how)).all()


class TestChoice:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda q, k, v: (q, k, v), "triton"),
            (lambda q, k, v: (q.double(), k.double(), v.double()), "torch: float64 over float64"),
            (lambda q, k, v: (q.bfloat16(), k, v), "torch: bfloat16 over float32"),
            (lambda q, k, v: (q, k, v.repeat(1, 1, 17)), "torch: head_dim 272 is more than 256"),
            (lambda q, k, v: (q.requires_grad_(), k, v), "torch: gradients are asked for"),
            (lambda q, k, v: (q, k.transpose(1, 2).contiguous().transpose(1, 2), v), "not contiguous"),
        ],
    )
    def test_names_the_implementation_and_why(self, triton, change, reason):
        assert reason in dispatch.attention_choice(*change(*drawn(1, 1, 8, 16, 16, 1)))

    def test_float64_agrees_to_its_own_precision(self, path):
        query, key, value = (t.double() for t in drawn(2, 3, 90, 8, 8, 4))
        options = {"scale": 0.4, "window": 20, "softcap": 3.0, "sinks": sinks_of(query, torch.float64)}
        ours = sparse_attention(query, key, value, [2, 9, 10, 77], AttentionOptions(**options))
        want = by_row(query, key, value, [2, 9, 10, 77], **options)
        torch.testing.assert_close(ours.cpu(), want, rtol=1e-12, atol=1e-12)


class TestRefused:
    def test_no_rows_are_no_error(self, path):
        query, key, value = drawn(2, 2, 10, 16, 5, 0)
        assert sparse_attention(query, key, value, [], AttentionOptions(scale=0.3)).shape == (4, 0, 5)

    @pytest.mark.parametrize("positions", [[3, 2], [3, 3], [-1, 2], [0, 10], [0, 5, 2]])
    def test_positions_out_of_order_or_outside(self, positions):
        query, key, value = drawn(1, 1, 10, 4, 4, len(positions))
        with pytest.raises(ValueError, match=r"ascending (within 0\.\.9|and not negative)"):
            sparse_attention(query, key, value, positions, AttentionOptions(scale=1.0))

    def test_heads_and_rows_that_do_not_fit(self):
        query, key, value = drawn(1, 3, 10, 4, 4, 3)
        with pytest.raises(ValueError, match="3 query rows but 2 positions"):
            sparse_attention(query, key, value, [1, 2], AttentionOptions(scale=1.0))
        with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads"):
            sparse_attention(
                query, key.repeat(2, 1, 1), value.repeat(2, 1, 1), [1, 2, 3], AttentionOptions(1.0)
            )

    @pytest.mark.parametrize("wrong", [{"scale": -1.0}, {"window": 0}, {"softcap": 0.0}])
    def test_options(self, wrong):
        with pytest.raises(ValueError, match="must be positive"):
            AttentionOptions(**{"scale": 1.0, **wrong})


@given(
    positions=st.lists(st.integers(0, 2000), min_size=1, max_size=400, unique=True).map(sorted),
    width=st.sampled_from([16, 576, 4096]),
    window=st.sampled_from([None, 1, 10, 100]),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_tiles_cover_all_rows_in_order_and_end_where_a_gap_costs_more_than_a_tile(positions, width, window):
    ranges = list(in_torch.tiles(positions, width, window))
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(len(positions)))
    for start, stop in ranges:
        assert 0 < stop - start <= in_torch.TILE_ROWS
        for row in range(start + 1, stop):
            keys_between = positions[row] - positions[row - 1] - 1
            assert (row - start) * keys_between * width <= in_torch.GAP_PRODUCTS
            assert window is None or keys_between < window
    for (start, stop), (after, _) in pairwise(ranges):
        keys_between = positions[after] - positions[stop - 1] - 1
        ended = stop - start == in_torch.TILE_ROWS or (window is not None and keys_between >= window)
        assert ended or (stop - start) * keys_between * width > in_torch.GAP_PRODUCTS
