"""A request's KV out into chunks' tensors: against float64, and against how stores round to eight bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.quantised import pack
from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import ChunkTensors, Place, Plane

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 44
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.fixture(params=["torch", "triton"])
def path(request, monkeypatch):
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", request.param)
    return request.param


def angles(pairs):
    return torch.arange(SLOTS, dtype=torch.float64)[:, None] * 40.0 ** (
        -torch.arange(pairs, dtype=torch.float64) / pairs
    )


def inverse(pairs, m):
    turn = angles(pairs)
    return (turn.cos() / m).float().to(DEVICE), (-turn.sin() / m).float().to(DEVICE)


def stripped(x, pairs, m, interleaved, offset, start):
    """float64: divided by m e^(i angle)."""
    out = x.double().cpu().clone()
    step = (2, 1) if interleaved else (1, pairs)
    first = [offset + step[0] * i for i in range(pairs)]
    second = [i + step[1] for i in first]
    turn = angles(pairs)[start : start + x.shape[1]]
    numbers = torch.complex(out[..., first], out[..., second]) / (m * torch.exp(1j * turn))
    out[..., first], out[..., second] = numbers.real, numbers.imag
    return out


def kv(seed, heads, dim, dtype, used):
    """Random where pieces lie, poison elsewhere; channels of very different sizes, and zeros."""
    x = torch.randn(heads, SLOTS, dim, generator=torch.Generator().manual_seed(seed))
    x = x * torch.logspace(-3, 2, dim)
    x[0, :, 0] = 0.0
    x[-1, 7] = 0.0
    hidden = torch.ones(SLOTS, dtype=torch.bool)
    for place in used:
        hidden[place.start : place.start + place.tokens] = False
    x[:, hidden] = float("nan")
    return x.to(dtype).to(DEVICE)


def empty(heads, dim, tokens, dtype, per_token=None):
    """A tensor to be written to and its scales, both poisoned, with room for two more tokens."""
    kind = dtype if per_token is None else KINDS[per_token[0]]
    poison = 77 if kind == torch.int8 else float("nan")
    tensor = torch.full((heads, tokens + 2, dim), poison, device=DEVICE).to(kind)
    if per_token is None:
        return tensor, None
    shape = (heads, tokens + 2, 1) if per_token[1] else (heads, 1, dim)
    return tensor, torch.full(shape, float("nan"), device=DEVICE)


def take(planes, places, kind, dtype, tables):
    chunks = []
    for place in places:
        pairs = [
            empty(p.kv.shape[0], p.kv.shape[2], place.tokens, dtype, kind and (kind, bool(i % 2)))
            for i, p in enumerate(planes)
        ]
        chunks.append(ChunkTensors(tuple(t for t, _ in pairs), tuple(s for _, s in pairs) if kind else ()))
    dispatch.disassemble(planes, places, chunks, tables)
    return chunks


PLACES = (Place(1, 6), Place(7, 9, rotated=True), Place(20, 23))


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_rotation_is_removed_to_within_one_rounding(path, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    pairs, offset, rest = (data.draw(st.integers(low, high)) for low, high in ((1, 9), (0, 3), (0, 3)))
    heads, dim = data.draw(st.sampled_from([1, 3, 8, 9])), offset + 2 * pairs + rest
    interleaved, m = data.draw(st.booleans()), data.draw(st.sampled_from([1.0, 1.25]))
    keys, values = kv(1, heads, dim, dtype, PLACES), kv(2, heads, dim, dtype, PLACES)
    planes = [Plane(keys, 0, interleaved, offset), Plane(values)]
    for place, chunk in zip(PLACES, take(planes, PLACES, None, dtype, [inverse(pairs, m)]), strict=True):
        at, tokens = slice(place.start, place.start + place.tokens), place.tokens
        assert torch.equal(chunk.tensors[1][:, :tokens], values[:, at])
        want = keys[:, at].double().cpu()
        if not place.rotated:
            want = stripped(keys[:, at], pairs, m, interleaved, offset, place.start)
        error = (chunk.tensors[0][:, :tokens].double().cpu() - want).abs()
        unit = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
        floor = 6e-8 if dtype == torch.float16 else 1e-7  # the step of float16's subnormal numbers
        assert bool((error <= 1.001 * unit * want.abs() + 1e-6 * want.abs().amax(-1, True) + floor).all())
        assert bool(torch.stack([t[:, tokens:].isnan() for t in chunk.tensors]).all())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 24), (3, 7), (2, 64)])
def test_rounds_as_the_store_does_bit_for_bit(path, kind, dtype, heads, dim):
    keys, values = kv(1, heads, dim, dtype, PLACES), kv(2, heads, dim, dtype, PLACES)
    for place, chunk in zip(PLACES, take([Plane(keys), Plane(values)], PLACES, kind, dtype, []), strict=True):
        at, tokens = slice(place.start, place.start + place.tokens), place.tokens
        want = pack(ChunkKV((keys[:, at].cpu(),), (values[:, at].cpu(),)), kind)
        assert torch.equal(chunk.scales[0].cpu(), want.sums["scale.k.0"])
        assert torch.equal(chunk.scales[1][:, :tokens].cpu(), want.sums["scale.v.0"])
        assert torch.equal(chunk.tensors[0][:, :tokens].float().cpu(), want.keys[0].float())
        assert torch.equal(chunk.tensors[1][:, :tokens].float().cpu(), want.values[0].float())
        spare = chunk.tensors[0][:, tokens:].float()
        assert bool((spare == 77).all() if kind == "int8" else spare.isnan().all())
        assert bool(chunk.scales[1][:, tokens:].isnan().all())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("interleaved", "offset", "dim"), [(False, 0, 16), (True, 0, 16), (False, 3, 21), (True, 2, 20)]
)
def test_rotated_and_rounded_lies_within_the_error_of_the_rounding(path, kind, interleaved, offset, dim):
    """The bounds that the store's ``pack`` promises, around the float64 rotation."""
    keys, values = kv(3, 2, dim, torch.float32, PLACES), kv(4, 2, dim, torch.float32, PLACES)
    planes = [Plane(keys, 0, interleaved, offset), Plane(values)]
    for place, chunk in zip(
        PLACES, take(planes, PLACES, kind, torch.float32, [inverse(8, 1.25)]), strict=True
    ):
        at = slice(place.start, place.start + place.tokens)
        want = keys[:, at].double().cpu()
        if not place.rotated:
            want = stripped(keys[:, at], 8, 1.25, interleaved, offset, place.start)
        got = chunk.tensors[0][:, : place.tokens].double().cpu()
        scale = chunk.scales[0].double().cpu()
        largest = 127 if kind == "int8" else 448
        torch.testing.assert_close(scale * largest, want.abs().amax(1, keepdim=True), rtol=1e-5, atol=1e-5)
        bound = scale / 2 if kind == "int8" else want.abs() / 16 + scale / 1024
        assert bool(((got * scale - want).abs() <= bound * 1.001 + 1e-5).all())


def test_there_and_back_again(path):
    """What is assembled and taken out again is what it was, to within two roundings."""
    source = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    x = torch.full((2, SLOTS, 16), float("nan"), device=DEVICE)
    turn = angles(8)
    there = ((turn.cos() * 1.25).float().to(DEVICE), (turn.sin() * 1.25).float().to(DEVICE))
    dispatch.assembly([Plane(x, 0)], [Place(30, 9)], [ChunkTensors((source,))], [there]).run()
    assert (x[:, 30:39] - source).abs().max() > 0.5
    back = ChunkTensors((torch.full_like(source, float("nan")),))
    dispatch.disassemble([Plane(x, 0)], [Place(30, 9)], [back], [inverse(8, 1.25)])
    torch.testing.assert_close(back.tensors[0], source, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # numpy's, inside Triton's interpreter
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("per_token", [False, True])
def test_kv_that_cannot_be_rounded_shows_in_its_scales(path, poison, per_token):
    keys, values = kv(1, 2, 8, torch.bfloat16, PLACES), kv(2, 2, 8, torch.bfloat16, PLACES)
    (values if per_token else keys)[1, 25, 3] = poison
    chunks = take([Plane(keys), Plane(values)], PLACES, "int8", torch.bfloat16, [])
    finite = [
        bool(c.scales[i][:, : p.tokens].isfinite().all())
        for c, p in zip(chunks, PLACES, strict=True)
        for i in (0, 1)
    ]
    assert finite == [True, True, True, True, per_token, not per_token]
