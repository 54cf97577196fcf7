"""Chunks into a request's KV against complex multiplication in float64, in torch and through Triton."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import ChunkTensors, Place, Plane
from ragcachekit_kernels.placement import moving
from ragcachekit_kernels.placement.planes import Layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 40
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDED = [torch.int8, torch.float8_e4m3fn]


@pytest.fixture(params=["torch", "triton"])
def path(request, monkeypatch):
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", request.param)
    return request.param


def angles(pairs):
    return torch.arange(SLOTS, dtype=torch.float64)[:, None] * 50.0 ** (
        -torch.arange(pairs, dtype=torch.float64) / max(pairs, 1)
    )


def table(pairs, m=1.0):
    turn = angles(pairs)
    return (turn.cos() * m).float().to(DEVICE), (turn.sin() * m).float().to(DEVICE)


def nan(*shape, dtype):
    return torch.full(shape, float("nan"), device=DEVICE).to(dtype)


def chunk(seed, tokens, shapes, dtype, spare=2):
    """Random tensors, per-channel scales for even planes and per-token ones for odd; poison after the end."""
    generator = torch.Generator().manual_seed(seed)
    tensors, scales = [], []
    for index, (heads, dim) in enumerate(shapes):
        x = torch.randn(heads, tokens + spare, dim, generator=generator)
        if dtype in ROUNDED:
            x *= 30
            shape = (heads, tokens + spare, 1) if index % 2 else (heads, 1, dim)
            scales.append(torch.rand(shape, generator=generator).to(DEVICE))
        if dtype != torch.int8:
            x[:, tokens:] = float("nan")
        tensors.append(x.to(dtype).to(DEVICE))
    return ChunkTensors(tuple(tensors), tuple(scales))


def exact(x, place, plane, pairs, m):
    """float64: pair i of the rotated stretch as a complex number, times m e^(i angle)."""
    out = x.double().cpu().clone()
    if plane.table is None or place.rotated:
        return out
    step = (2, 1) if plane.interleaved else (1, pairs)
    first = [plane.offset + step[0] * i for i in range(pairs)]
    second = [i + step[1] for i in first]
    turn = angles(pairs)[place.start : place.start + place.tokens]
    numbers = torch.complex(out[..., first], out[..., second]) * m * torch.exp(1j * turn)
    out[..., first], out[..., second] = numbers.real, numbers.imag
    return out


def plain(c, index, place):
    rows = slice(place.first, place.first + place.tokens)
    x = c.tensors[index][:, rows].double()
    if not c.scales:
        return x
    scale = c.scales[index].double()
    return x * (scale if index % 2 == 0 else scale[:, rows])


def assert_once_rounded(got, want):
    """Half a unit in the last place of the result, and float32's own error in computing it."""
    unit = torch.finfo(got.dtype).eps / 2 if got.dtype != torch.float32 else 0.0
    size = want.abs().amax(-1, keepdim=True)
    error = (got.double().cpu() - want).abs()
    assert bool((error <= unit * want.abs() * 1.001 + 1e-6 * size + 1e-7).all()), float(error.max())


def check(kv, planes, places, chunks, pairs, m, skip, before):
    for index, plane in enumerate(planes):
        untouched = torch.ones(SLOTS, dtype=torch.bool)
        for place, c, was in zip(places, chunks, before, strict=True):
            source = was[index] if c is None else plain(c, index, place)
            want = exact(source, place, plane, pairs, m)
            rows = [p for p in range(place.start, place.start + place.tokens) if p not in skip]
            if rows:
                assert_once_rounded(kv[index][:, rows], want[:, [p - place.start for p in rows]])
            untouched[place.start : place.start + place.tokens] = c is None and plane.table is None
            untouched[[p for p in skip if place.start <= p < place.start + place.tokens]] = c is not None
        if None not in chunks:
            assert bool(kv[index][:, untouched].isnan().all())


@settings(
    max_examples=16,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_is_the_float64_rotation_and_nothing_else_is_written(path, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    pairs = data.draw(st.integers(0, 9))
    offset = data.draw(st.sampled_from([0, 0, 1, 4])) if pairs else 0
    dim = offset + 2 * pairs + data.draw(st.sampled_from([0, 0, 3])) or 8
    heads = data.draw(st.sampled_from([1, 2, 3, 8, 9]))
    interleaved, m = data.draw(st.booleans()), data.draw(st.sampled_from([1.0, 1.25]))
    places, at = [], 0
    while len(places) < 3:
        start = at + data.draw(st.integers(0, 2))
        first = data.draw(st.sampled_from([0, 0, 1, 5]))
        places.append(Place(start, data.draw(st.integers(1, 10)), data.draw(st.booleans()), first))
        at = start + places[-1].tokens
    skip = sorted(data.draw(st.sets(st.integers(0, SLOTS - 1), max_size=12)))
    kinds = [data.draw(st.sampled_from([dtype, torch.float32, *ROUNDED])) for _ in places]
    shapes = [(heads, dim)] * 4
    chunks = [chunk(i, p.first + p.tokens, shapes, kinds[i]) for i, p in enumerate(places)]
    kv = [nan(heads, SLOTS, dim, dtype=dtype) for _ in shapes]
    turning = 0 if pairs else None
    planes = [Plane(x, None if i % 2 else turning, interleaved, offset) for i, x in enumerate(kv)]
    dispatch.assembly(planes, places, chunks, [table(pairs, m)], skip=skip).run()
    check(kv, planes, places, chunks, pairs, m, skip, [None] * 3)


@pytest.mark.parametrize("interleaved", [False, True])
def test_what_lies_in_place_already_is_rotated_there(path, interleaved):
    kv = [nan(2, SLOTS, 16, dtype=torch.bfloat16) for _ in range(2)]
    here = torch.randn(2, 2, 11, 16, generator=torch.Generator().manual_seed(5)).bfloat16()
    places = [Place(1, 11), Place(14, 6)]
    for x, rows in zip(kv, here, strict=True):
        x[:, 1:12] = rows
    planes = [Plane(kv[0], 0, interleaved), Plane(kv[1])]
    chunks = [None, chunk(1, 6, [(2, 16)] * 2, torch.bfloat16)]
    dispatch.assembly(planes, places, chunks, [table(8)], skip=[3]).run()
    check(kv, planes, places, chunks, 8, 1.0, [3], [here, None])
    for x, rows in zip(kv, here, strict=True):
        assert torch.equal(x[:, 3].cpu(), rows[:, 2])
    assert torch.equal(kv[1][:, 1:12].cpu(), here[1])


def test_keys_and_values_of_different_widths_several_tables_and_types(path):
    """Multi-head latent attention turns what lies where values do; models mix frequencies per layer."""
    shapes = [(1, 32), (1, 8), (1, 32), (1, 8)]
    kv = [nan(h, SLOTS, d, dtype=torch.bfloat16) for h, d in shapes]
    planes = [Plane(kv[0]), Plane(kv[1], 0, True), Plane(kv[2]), Plane(kv[3], 1)]
    places = [Place(0, 5, True), Place(6, 13), Place(30, 1)]
    kinds = [torch.bfloat16, torch.int8, torch.bfloat16]
    chunks = [chunk(i, p.tokens, shapes, kinds[i]) for i, p in enumerate(places)]
    dispatch.assembly(planes, places, chunks, [table(4), table(4)]).run()
    check(kv, planes, places, chunks, 4, 1.0, [], [None] * 3)


def test_a_range_of_planes_at_a_time(path, monkeypatch):
    kernels = pytest.importorskip("ragcachekit_kernels.placement.assembly")
    monkeypatch.setattr(kernels, "GROUP", 2)
    monkeypatch.setattr(kernels, "TILE_BYTES", 256)
    kv = [nan(2, SLOTS, 8, dtype=torch.float32) for _ in range(6)]
    planes = [Plane(x, None if i % 2 else 0) for i, x in enumerate(kv)]
    places = [Place(2, 9), Place(12, 17), Place(33, 2)]
    chunks = [chunk(i, p.tokens, [(2, 8)] * 6, torch.float32) for i, p in enumerate(places)]
    ready = dispatch.assembly(planes, places, chunks, [table(4)])
    for layer in range(3):
        assert bool(torch.stack(kv[2 * layer :]).isnan().all())
        ready.run(2 * layer, 2 * layer + 2)
    check(kv, planes, places, chunks, 4, 1.0, [], [None] * 3)


def test_strided_and_unaligned_tensors(path):
    wide = nan(4, SLOTS + 7, 6, dtype=torch.float16)
    kv = [wide[::2, 3 : 3 + SLOTS], nan(2, SLOTS, 6, dtype=torch.float16)]
    c = chunk(3, 12, [(5, 6)] * 2, torch.float16)
    views = ChunkTensors(tuple(t[1:5:2, 1:] for t in c.tensors))
    planes = [Plane(kv[0], 0), Plane(kv[1])]
    places = [Place(20, 11)]
    dispatch.assembly(planes, places, [views], [table(3)]).run()
    check(kv, planes, places, [views], 3, 1.0, [], [None])
    assert bool(wide[1::2].isnan().all())
    assert bool(wide[:, :23].isnan().all())


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, inside Triton's interpreter
def test_what_is_not_rotated_is_copied_bit_for_bit_infinities_too(path):
    kv = [nan(2, SLOTS, 8, dtype=torch.bfloat16) for _ in range(2)]
    c = chunk(4, 7, [(2, 8)] * 2, torch.bfloat16)
    for tensor in c.tensors:
        tensor[0, 2] = float("inf")
        tensor[1, 3, ::2] = float("-inf")
    copies = [t.clone() for t in c.tensors]
    dispatch.assembly([Plane(kv[0], 0), Plane(kv[1])], [Place(9, 7, rotated=True)], [c], [table(4)]).run()
    for x, tensor, copy in zip(kv, c.tensors, copies, strict=True):
        assert torch.equal(x[:, 9:16], tensor[:, :7])
        assert torch.equal(tensor[:, :7], copy[:, :7])


def test_nothing_to_put_in_place(path):
    kv = nan(2, SLOTS, 8, dtype=torch.float32)
    dispatch.assembly([Plane(kv, 0)], [], [], [table(4)]).run()
    dispatch.assembly(
        [Plane(kv, 0)], [Place(3, 2)], [chunk(0, 2, [(2, 8)], kv.dtype)], [table(4)], skip=[3, 4]
    ).run()
    assert bool(kv.isnan().all())


@pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in Triton's interpreter")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("stored", [torch.bfloat16, *ROUNDED])
def test_thousands_of_blocks_equal_the_reference(monkeypatch, interleaved, stored):
    """Several groups of blocks, head tiles and waves of programs; every other row is skipped in one piece."""
    shapes, slots = [(16, 128)] * 4, 9000
    places = [Place(10 + 700 * i, 700 - i, rotated=i == 0) for i in range(12)]
    chunks = [chunk(i, p.tokens, shapes, stored) for i, p in enumerate(places)]
    turn = torch.arange(slots, device=DEVICE)[:, None] * 1e4 ** (-torch.arange(64, device=DEVICE) / 64)
    skip = [*range(1500, 1600, 2), *range(3000, 3300), 8999]
    done = []
    for way in ("torch", "triton"):
        monkeypatch.setenv("RAGCACHEKIT_KERNELS", way)
        kv = [nan(h, slots, d, dtype=torch.bfloat16) for h, d in shapes]
        planes = [Plane(x, None if i % 2 else 0, interleaved) for i, x in enumerate(kv)]
        dispatch.assembly(planes, places, chunks, [(turn.cos(), turn.sin())], skip=skip).run()
        done.append(torch.stack(kv))
    torch.testing.assert_close(done[1], done[0], rtol=2**-7, atol=1e-3, equal_nan=True)


def test_joined_parts_are_one_chunk():
    a = chunk(0, 5, [(2, 8), (2, 8)], torch.int8)
    b = chunk(1, 5, [(2, 8), (2, 16)], torch.float16)
    parts = [b, a, b]
    joined = ChunkTensors.joined(parts)
    again = ChunkTensors([t for p in parts for t in p.tensors], [p.scale(i) for p in parts for i in (0, 1)])
    assert joined.signature == again.signature
    assert joined.formats == tuple(f for p in parts for f in p.formats)
    assert joined.entries.tolist() == again.entries.tolist()
    assert all(x is y for x, y in zip(joined.tensors, again.tensors, strict=True))
    assert ChunkTensors.joined([b]).scales == ()


class TestBadInput:
    def layout(self, places, sizes=(5,), dim=8, pairs=4, slots=SLOTS, planes=1):
        chunks = [chunk(0, size, [(2, dim)], torch.float32, spare=0) for size in sizes]
        kv = nan(2, slots, 8, dtype=torch.float32)
        return Layout([Plane(kv, 0)] * planes, places, chunks, [table(pairs)])

    def test_a_good_one_is_taken(self):
        assert self.layout([Place(3, 5)]).stop == 8

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"places": [Place(3, 5), Place(6, 1)], "sizes": (5, 5)}, "overlap"),
            ({"places": [Place(-1, 5)]}, "starts at 0"),
            ({"places": [Place(3, 0)]}, "at least one token"),
            ({"places": [Place(3, 6)]}, "has no 6"),
            ({"places": [Place(3, 5, False, 1)]}, "has no 6"),
            ({"places": [Place(3, 5)], "slots": 7}, "does not hold"),
            ({"places": [Place(3, 5)], "pairs": 5}, "do not fit"),
            ({"places": [Place(3, 5)], "dim": 10}, "2 heads x 10"),
            ({"places": [Place(3, 5)], "planes": 2}, "as many tensors"),
            ({"places": [Place(3, 5)], "sizes": ()}, "as many chunks"),
        ],
    )
    def test_says_what_does_not_fit(self, arguments, says):
        with pytest.raises(ValueError, match=says):
            self.layout(**arguments)

    def test_rows_must_be_contiguous(self):
        kv = nan(2, SLOTS, 16, dtype=torch.float32)[..., ::2]
        with pytest.raises(ValueError, match="contiguous"):
            Layout([Plane(kv)], [], [], [])


class TestChoice:
    def layout(self, dtype, stored):
        kv = nan(2, SLOTS, 8, dtype=dtype)
        return Layout([Plane(kv)], [Place(0, 3)], [chunk(0, 3, [(2, 8)], stored)], [])

    @pytest.mark.parametrize(
        ("dtype", "stored", "triton"),
        [
            (torch.bfloat16, torch.bfloat16, True),
            (torch.float16, torch.int8, True),
            (torch.float64, torch.float64, False),
        ],
    )
    def test_by_types(self, monkeypatch, dtype, stored, triton):
        monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")
        assert moving._has_kernels(self.layout(dtype, stored)) == triton

    def test_torch_when_told_so(self, monkeypatch):
        monkeypatch.setenv("RAGCACHEKIT_KERNELS", "torch")
        assert not moving._has_kernels(self.layout(torch.float32, torch.float32))
