"""Chunk KV into a request's cache against complex multiplication in float64, in torch and through Triton."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import Place, Places, Rotation

pytestmark = pytest.mark.usefixtures("path")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 40
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def angles(pairs, slots=SLOTS):
    return torch.arange(slots, dtype=torch.float64)[:, None] * 50.0 ** (
        -torch.arange(pairs, dtype=torch.float64) / max(pairs, 1)
    )


def rotation(pairs, m=1.0, interleaved=False, offset=0, slots=SLOTS):
    turn = angles(pairs, slots)
    tables = (turn.cos() * m).float().to(DEVICE), (turn.sin() * m).float().to(DEVICE)
    return Rotation(*tables, interleaved, offset)


def nan(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), device=DEVICE).to(dtype)


def piece(seed, tokens, heads, dim, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, tokens, dim, generator=generator).to(dtype).to(DEVICE)


def exact(tensor, place, how, m=1.0):
    """float64: pair i of the rotated part as a complex number, times m e^(i angle)."""
    out = tensor.double().cpu()
    if how is None or place.rotated:
        return out
    pairs = how.cos.shape[1]
    step = (2, 1) if how.interleaved else (1, pairs)
    first = [how.offset + step[0] * i for i in range(pairs)]
    second = [i + step[1] for i in first]
    turn = angles(pairs, how.cos.shape[0])[place.start : place.start + place.tokens]
    numbers = torch.complex(out[..., first], out[..., second]) * m * torch.exp(1j * turn)
    out[..., first], out[..., second] = numbers.real, numbers.imag
    return out


def assert_once_rounded(got, want):
    """Half a unit in the last place of the result, and float32's own error in computing it."""
    unit = torch.finfo(got.dtype).eps / 2 if got.dtype != torch.float32 else 0.0
    size = want.abs().amax(-1, keepdim=True)
    error = (got.double().cpu() - want).abs()
    assert bool((error <= unit * want.abs() * 1.001 + 1e-6 * size + 1e-7).all()), float(error.max())


def check(out, pieces, places, how, m=1.0):
    untouched = torch.ones(out.shape[1], dtype=torch.bool)
    for tensor, place in zip(pieces, places, strict=True):
        at = slice(place.start, place.start + place.tokens)
        assert_once_rounded(out[:, at], exact(tensor, place, how, m))
        untouched[at] = False
    assert bool(out[:, untouched].isnan().all()), "nothing else is written"


def run(out, pieces, places, how=None):
    dispatch.assemble(out, pieces, Places(tuple(places)), how)


@pytest.mark.parametrize("examples", [8, pytest.param(40, marks=pytest.mark.soak)])
def test_is_the_float64_rotation_and_nothing_else_is_written(examples):
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(data=st.data())
    def written(data):
        dtype = data.draw(st.sampled_from(DTYPES))
        pairs = data.draw(st.integers(0, 9))
        offset = data.draw(st.sampled_from([0, 0, 1, 4])) if pairs else 0
        dim = offset + 2 * pairs + data.draw(st.sampled_from([0, 0, 3])) or 8
        heads = data.draw(st.sampled_from([1, 2, 3, 8, 9]))
        interleaved, m = data.draw(st.booleans()), data.draw(st.sampled_from([1.0, 1.25]))
        places, at = [], 0
        while len(places) < 3:
            start = at + data.draw(st.integers(0, 2))
            places.append(Place(start, data.draw(st.integers(1, 10)), data.draw(st.booleans())))
            at = start + places[-1].tokens
        kinds = [data.draw(st.sampled_from([dtype, torch.float32])) for _ in places]
        of = enumerate(zip(places, kinds, strict=True))
        pieces = [piece(i, place.tokens, heads, dim, kind) for i, (place, kind) in of]
        how = rotation(pairs, m, interleaved, offset) if pairs else None
        out = nan(heads, SLOTS, dim, dtype=dtype)
        run(out, pieces, places, how)
        check(out, pieces, places, how, m)

    written()


@pytest.mark.parametrize("interleaved", [False, True])
def test_ragged_pieces_of_a_long_prompt(interleaved):
    places = [Place(10 + 300 * i, 300 - 57 * i, rotated=i == 0) for i in range(5)]
    pieces = [piece(i, p.tokens, 2, 32, torch.bfloat16) for i, p in enumerate(places)]
    how, out = rotation(16, 1.0, interleaved, slots=1600), nan(2, 1600, 32, dtype=torch.bfloat16)
    run(out, pieces, places, how)
    check(out, pieces, places, how)


def test_strided_tensors():
    out = nan(4, SLOTS + 7, 6, dtype=torch.float16)[::2, 3 : 3 + SLOTS]
    pieces = [piece(i, 12, 5, 6, torch.float16) for i in range(2)]
    views = [tensor[1:5:2, 1:] for tensor in pieces]
    places, how = [Place(2, 11), Place(20, 11)], rotation(3)
    run(out, views, places, how)
    check(out, views, places, how)


def test_a_piece_that_is_rotated_already_is_copied_to_the_bit():
    out, pieces = nan(2, SLOTS, 8, dtype=torch.bfloat16), [piece(4, 7, 2, 8, torch.bfloat16)]
    pieces[0][0, 0] = float("inf")
    run(out, pieces, [Place(9, 7, rotated=True)], rotation(4))
    assert torch.equal(out[:, 9:16], pieces[0])


def test_positions_are_copied_to_the_device_once_for_all_layers():
    places = Places((Place(1, 4), Place(6, 2)))
    first = places.rows(torch.device(DEVICE), (0, 1))
    assert places.rows(torch.device(DEVICE), (0, 1)) is first
    assert first.tolist() == [[1, 2, 3, 4, 6, 7]] * 2


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([Place(3, 5), Place(6, 1)], "overlap"),
        ([Place(-1, 5)], "starts at 0"),
        ([Place(3, 0)], "at least one token"),
    ],
)
def test_places_that_cannot_be_are_refused(places, message):
    with pytest.raises(ValueError, match=message):
        Places(tuple(places))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": 7}, "does not hold"),
        ({"tokens": 4}, "does not fit"),
        ({"dim": 10}, "does not fit"),
        ({"count": 2}, "as many tensors"),
        ({"pairs": 5}, "do not fit"),
        ({"positions": 7}, "8 rows or more"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    sizes = {"slots": 8, "tokens": 5, "dim": 8, "count": 1, "pairs": 4, "positions": 8}
    sizes |= arguments
    tensors = [torch.zeros(2, sizes["tokens"], sizes["dim"], device=DEVICE)] * sizes["count"]
    how = rotation(sizes["pairs"], slots=sizes["positions"])
    with pytest.raises(ValueError, match=message):
        dispatch.assemble(nan(2, sizes["slots"], 8), tensors, Places((Place(3, 5),)), how)
