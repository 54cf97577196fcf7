"""Attention sums per key, context mass and log-sum-exps against float64 loops over single rows.

Once in torch, once through Triton: interpreted on a CPU, compiled on a GPU.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcachekit_kernels.dispatch import AttentionOptions, choice, column_scores, context_mass
from soak_kit import soaked

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
DRAWN = {"deadline": None, "derandomize": True}


def exponentials(query, key, head, row, position, start, stop, scale, window, softcap):
    """``exp(score)`` in float64 of the keys ``start..stop`` that one row sees, and which these are."""
    low = start if window is None else max(start, position - window + 1)
    seen = slice(low, max(low, min(stop, position + 1)))
    scores = key[head * key.shape[0] // query.shape[0], seen].double() @ query[head, row].double() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.exp(), seen


def by_row(query, key, positions, spans, *, scale, window=None, softcap=None, sinks=None):
    query, key = query.cpu(), key.cpu()
    out = torch.zeros(key.shape[1], dtype=torch.float64)
    for head, (row, position) in itertools.product(range(query.shape[0]), enumerate(positions)):
        extra = sinks[head].double().exp().cpu() if sinks is not None and spans is None else 0.0
        for start, stop in [(0, key.shape[1])] if spans is None else spans:
            weights, seen = exponentials(query, key, head, row, position, start, stop, scale, window, softcap)
            if len(weights):
                out[seen] += weights / (weights.sum() + extra)
    return out


def drawn(kv_heads, groups, tokens, width, rows, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype).to(DEVICE)

    return tensor(kv_heads * groups, rows, width), tensor(kv_heads, tokens, width)


def close(ours, want, tolerance=3e-5):
    torch.testing.assert_close(ours.double().cpu(), want, rtol=tolerance, atol=tolerance)


@st.composite
def cases(draw):
    tokens = draw(st.one_of(st.integers(1, 150), st.just(600)))
    positions = draw(
        st.one_of(
            st.lists(st.integers(0, tokens - 1), min_size=1, max_size=12, unique=True).map(sorted),
            st.integers(max(0, tokens - 16), tokens - 1).map(lambda start: list(range(start, tokens))),
        )
    )
    edges = sorted(draw(st.lists(st.integers(0, tokens), max_size=8)))
    return {
        "shape": (
            *(draw(st.integers(1, most)) for most in (2, 8)),
            tokens,
            draw(st.sampled_from([3, 16, 40])),
        ),
        "positions": positions,
        "spans": draw(st.sampled_from([None, list(zip(edges[::2], edges[1::2], strict=False))])),
        "window": draw(st.one_of(st.none(), st.integers(1, tokens + 3))),
        "softcap": draw(st.sampled_from([None, 3.0])),
        "sinks": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        "seed": draw(st.integers(0, 99)),
    }


def of_case(case, dtype=None):
    query, key = drawn(*case["shape"], len(case["positions"]), case["seed"], dtype or case["dtype"])
    options = {"scale": case["shape"][3] ** -0.5, "window": case["window"], "softcap": case["softcap"]}
    sinks = torch.linspace(-2, 3, query.shape[0], device=DEVICE) if case["sinks"] else None
    return query, key, options | {"sinks": sinks}


@pytest.mark.parametrize("examples", [6, pytest.param(30, marks=pytest.mark.soak)])
def test_any_shape_against_the_float64_loop(path, examples):
    @settings(max_examples=examples, **DRAWN)
    @given(case=cases())
    def check(case):
        # On CPUs a scaled query is rounded to its 16 bits: torch is compared in float32.
        query, key, options = of_case(case, torch.float32 if path == "torch" else None)
        ours = column_scores(query, key, case["positions"], AttentionOptions(**options), case["spans"])
        assert ours.dtype == torch.float32
        close(ours, by_row(query, key, case["positions"], case["spans"], **options))

    check()


@pytest.mark.parametrize(("slots", "window"), soaked([(1, 30), (2, None), (16, 30)], (2, None)))
def test_tiles_that_share_a_slot_add_up(triton, monkeypatch, slots, window):
    from ragcachekit_kernels import scores

    monkeypatch.setattr(scores, "SLOTS", slots)
    tiny = scores.Tiling(16, 32, 4, 2, None)
    monkeypatch.setattr(scores, "tiling", lambda *_, **__: tiny)
    positions = list(range(3, 100, 3))
    query, key = drawn(1, 3, 100, 16, len(positions), dtype=torch.bfloat16)
    for spans in (None, [(0, 20), (33, 99)]):
        ours = column_scores(query, key, positions, AttentionOptions(scale=0.3, window=window), spans)
        close(ours, by_row(query, key, positions, spans, scale=0.3, window=window))


class TestPoison:
    """NaN that no row may see does not spread, wherever it lies."""

    @pytest.mark.parametrize("spans", [None, [(5, 60), (100, 170)]])
    def test_keys_outside_the_window_and_after_the_last_row(self, path, spans):
        positions, options = [50, 150], AttentionOptions(scale=0.3, window=10)
        query, key = drawn(2, 2, 200, 16, 2)
        want = column_scores(query, key, positions, options, spans)
        outside = [p for p in range(200) if not (41 <= p <= 50 or 141 <= p <= 150)]
        key[:, outside] = NAN
        ours = column_scores(query, key, positions, options, spans)
        assert torch.equal(ours, want)
        assert not ours[outside].any()

    def test_keys_between_spans_and_beyond_a_view(self, triton):
        query, key = drawn(2, 2, 200, 16, 3)
        arguments = [120, 130, 150], AttentionOptions(scale=0.3), [(3, 40), (80, 119)]
        want = column_scores(query, key, *arguments)
        key[:, 40:80], key[:, :3], key[:, 119:] = NAN, NAN, NAN
        assert torch.equal(column_scores(query, key[:, :151], *arguments), want[:151])


def test_each_row_gives_one_and_twice_the_same(path):
    positions = list(range(100, 250))  # more than a tile
    query, key = drawn(2, 4, 260, 32, 150, dtype=torch.bfloat16)
    first, again = (column_scores(query, key, positions, AttentionOptions(scale=0.2)) for _ in range(2))
    assert torch.equal(first, again)
    assert float(first.sum()) == pytest.approx(150 * 8, rel=1e-3 if path == "torch" else 1e-5)
    assert not column_scores(query, key, positions, AttentionOptions(scale=0.2), []).any()
    assert not column_scores(query[:, :0], key, [], AttentionOptions(scale=0.2)).any()


def test_strides_of_a_projection_and_large_scores(path):
    positions = [9, 40, 41]
    query, key = drawn(2, 3, 60, 16, 3)
    token_major = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key)]
    want = column_scores(query, key, positions, AttentionOptions(scale=0.3))
    close(column_scores(*token_major, positions, AttentionOptions(scale=0.3)), want.double().cpu())
    last_dim = key.transpose(1, 2).contiguous().transpose(1, 2)
    close(column_scores(query, last_dim, positions, AttentionOptions(scale=0.3)), want.double().cpu())
    for softcap in (None, 20.0):
        options = AttentionOptions(scale=1.0, softcap=softcap)
        large = column_scores(query * 1e3, key * 1e3, positions, options)
        assert torch.isfinite(large).all()
        assert float(large.sum()) == pytest.approx(18, rel=1e-4)


@pytest.mark.parametrize("window", [None, 25])
@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [(torch.float32, (40,)), (torch.float32, (1, 0, 5, 64)), (torch.bfloat16, (7, 20, 33))],
)
def test_where_a_chunks_attention_goes(path, dtype, lengths, window):
    tokens, begin = sum(lengths), sum(lengths[:-1])
    positions = range(begin, tokens)
    query, key = drawn(2, 2, tokens, 16, len(positions), dtype=dtype)
    sinks = torch.linspace(-1, 1, 4, device=DEVICE)
    weights = torch.zeros(len(positions), tokens, dtype=torch.float64)
    for head, (row, position) in itertools.product(range(4), enumerate(positions)):
        some, seen = exponentials(query.cpu(), key.cpu(), head, row, position, 0, tokens, 0.3, window, 4.0)
        weights[row, seen] += some / (some.sum() + sinks[head].double().exp().cpu())
    options = AttentionOptions(scale=0.3, window=window, softcap=4.0, sinks=sinks)
    mass = context_mass(query, key, positions, lengths, options)
    bounds = list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))
    segments = torch.stack([weights[:, a:b].sum() for a, b in bounds])
    close(mass.inter, segments[:-1], 1e-4)
    close(mass.intra, segments[-1], 1e-4)
    close(mass.outward, weights[:, :begin].sum(1), 1e-4)


@pytest.mark.parametrize(
    ("dtype", "width", "said"),
    [
        (torch.bfloat16, 128, "triton"),
        (torch.float32, 256, "triton"),
        (torch.float64, 64, "torch: float64 over float64"),
        (torch.float16, 288, "torch: head_dim 288 is more than 256"),
    ],
)
def test_the_choice_names_where_tensors_go_and_why(triton, dtype, width, said):
    query, key = drawn(1, 2, 9, width, 2, dtype=dtype)
    assert choice("scores", query, key) == said
    tolerance = 2e-3 if width > 256 else 3e-5  # on CPUs a scaled query is rounded to its 16 bits
    ours = column_scores(query, key, [3, 8], AttentionOptions(scale=0.1))
    close(ours, by_row(query, key, [3, 8], None, scale=0.1), tolerance)


def test_what_does_not_fit_is_refused():
    query, key = drawn(1, 1, 10, 16, 3)
    with pytest.raises(ValueError, match="do not make up 10 keys"):
        context_mass(query, key, [7, 8, 9], [4, 3], AttentionOptions(scale=1.0))
    for span in ((-1, 3), (4, 2), (0, 11)):
        with pytest.raises(ValueError, match="span"):
            column_scores(query, key, [7, 8, 9], AttentionOptions(scale=1.0), [span])


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a sparse file stands in for memory")
def test_keys_that_lie_more_than_31_bits_apart(triton, tmp_path):
    """Strided views of a large cache: a product of 32 bits would turn back and read what lies before."""
    step, before = 2**30, 2**31
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(2 * (before + 3 * step + 16))  # takes no room but for what is written
    memory = torch.from_file(str(path), shared=True, size=before + 3 * step + 16, dtype=torch.float16)
    key = memory.as_strided((1, 4, 16), (16, step, 1), before)
    query, near = (torch.randn(1, n, 16, generator=torch.Generator().manual_seed(n)) for n in (2, 4))
    key.copy_(near)
    found = column_scores(query.half(), key, [1, 3], AttentionOptions(scale=0.3))
    want = column_scores(query.half(), near.half(), [1, 3], AttentionOptions(scale=0.3))
    assert torch.equal(found, want)
    assert (want > 0).all()
