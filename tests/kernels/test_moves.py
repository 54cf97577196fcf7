"""Rows of a chunk moved by what similar rows were moved by, against float64, in torch and in Triton."""

import itertools

import pytest
import torch

from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import Group, Groups, Rotation

pytestmark = pytest.mark.usefixtures("path")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, ROWS, HEADS = 230, 40, 2
GROUPS = Groups((Group(3, 20, 2, 3), Group(20, 120, 3, 35), Group(121, 230, 36, 40)))
TYPES = {torch.float64: 2e-5, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def made(dims, by, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sides = tuple(torch.randn(HEADS, TOKENS, dim, generator=generator).to(dtype) for dim in dims)
    moves = tuple(torch.randn(HEADS, ROWS, dim, generator=generator) for dim in dims)
    alike = torch.nn.functional.normalize(torch.randn(HEADS, ROWS, dims[by], generator=generator), dim=-1) * 5
    return sides, moves, alike


def turned(x, positions, pairs, m, interleaved, offset):
    """Pair i of every row as a complex number, times m e^(i angle)."""
    out = x.double().clone()
    for pair in range(pairs):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)
        number = torch.complex(out[:, offset + a], out[:, offset + b])
        number *= m * torch.exp(1j * positions / 50.0 ** (pair / pairs))
        out[:, offset + a], out[:, offset + b] = number.real, number.imag
    return out


def tables(pairs, m, interleaved, offset):
    angles = torch.arange(TOKENS)[:, None] / 50.0 ** (torch.arange(pairs) / pairs).double()
    return Rotation(
        *((f(angles) * m).float().to(DEVICE) for f in (torch.cos, torch.sin)), interleaved, offset
    )


@pytest.mark.parametrize(
    ("dtype", "dims", "by", "pairs", "m", "interleaved", "offset"),
    [
        *((dtype, (32, 32), 1, 16, 1.0, False, 0) for dtype in TYPES),
        (torch.float32, (32, 24), 1, 16, 1.3, True, 0),
        (torch.bfloat16, (32, 24), 1, 16, 1.3, True, 0),
        (torch.float32, (40, 16), 1, 8, 1.0, False, 20),
        (torch.float32, (48, 16), 0, 8, 1.0, True, 0),
        (torch.float16, (48, 16), 0, 8, 1.0, True, 0),
    ],
)
def test_a_row_moves_by_the_mean_of_its_groups_moves(dtype, dims, by, pairs, m, interleaved, offset):
    sides, moves, alike = made(dims, by, dtype)
    on = [tuple(x.clone().to(DEVICE) for x in pair) for pair in (sides, moves)]
    how = pairs, m, interleaved, offset
    turn = [None, None]
    turn[1 - by] = tables(*how)
    dispatch.move_alike(on[0], on[1], alike.to(DEVICE), by, GROUPS, tuple(turn))
    beside = [i for i in range(TOKENS) if not any(g.start <= i < g.stop for g in GROUPS)]
    for side in (0, 1):
        assert torch.equal(on[0][side][:, beside].cpu(), sides[side][:, beside])
    for head, group in itertools.product(range(HEADS), GROUPS):
        positions = torch.arange(group.start, group.stop)
        x = sides[by][head, positions].double()
        scores = x @ alike[head, group.first : group.last].double().T / x.norm(dim=1, keepdim=True)
        for side in (0, 1):
            move = scores.softmax(1) @ moves[side][head, group.first : group.last].double()
            expected = sides[side][head, positions].double()
            expected += turned(move, positions, *how) if side != by else move
            error = (on[0][side][head, positions].double().cpu() - expected).abs().amax(1)
            assert (error < TYPES[dtype] * expected.abs().amax(1).clamp(min=1)).all()


def test_rows_of_zeros_move_by_the_plain_mean_and_no_group_means_no_move():
    (keys, values), moves, alike = made((16, 16), 1, torch.float32)
    sides = keys.to(DEVICE), torch.zeros_like(values).to(DEVICE)
    moves, alike = tuple(x.to(DEVICE) for x in moves), alike.to(DEVICE)
    dispatch.move_alike(sides, moves, alike, 1, Groups(()), (None, None))
    assert torch.equal(sides[0].cpu(), keys)
    dispatch.move_alike(sides, moves, alike, 1, Groups((Group(0, 9, 4, 10),)), (None, None))
    mean = moves[1][:, 4:10].mean(1, keepdim=True).expand(-1, 9, -1)
    assert torch.allclose(sides[1][:, :9], mean, atol=1e-6)
    assert not sides[1][:, 9:].any()


def test_rows_beside_a_group_may_be_anything():
    (keys, values), moves, alike = made((16, 16), 1, torch.float32)
    for x in (*moves, alike):
        x[:, 6:] = float("nan")
    sides, moves = ((x.to(DEVICE), y.to(DEVICE)) for x, y in ((keys, values), moves))
    dispatch.move_alike(sides, moves, alike.to(DEVICE), 1, Groups((Group(0, 70, 1, 6),)), (None, None))
    assert all(side.isfinite().all() for side in sides)


@pytest.mark.parametrize("groups", [(Group(0, 9, 3, 3),), (Group(0, 9, 0, 2), Group(8, 12, 2, 3))])
def test_groups_that_cannot_be(groups):
    with pytest.raises(ValueError, match="groups must ascend"):
        Groups(groups)


@pytest.mark.parametrize("group", [Group(0, TOKENS + 1, 0, 2), Group(0, 9, 0, ROWS + 1)])
def test_groups_outside_of_the_rows(group):
    sides, moves, alike = made((16, 16), 1, torch.float32)
    with pytest.raises(ValueError, match="does not lie within"):
        dispatch.move_alike(sides, moves, alike, 1, Groups((group,)), (None, None))


@pytest.mark.parametrize("refused", [0, 1], ids=["first", "second"])
def test_after_a_refused_launch_torch_starts_from_unmoved_rows(triton, monkeypatch, refused):
    from triton.runtime.errors import OutOfResources

    from ragcachekit_kernels import moves as kernels

    (keys, values), shifts, alike = made((16, 16), 1, torch.float32)
    sides, shifts = ((x.to(DEVICE), y.to(DEVICE)) for x, y in ((keys, values), shifts))
    expected = tuple(side.clone() for side in sides)
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", "torch")
    dispatch.move_alike(expected, shifts, alike.to(DEVICE), 1, GROUPS, (None, None))
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")
    monkeypatch.setattr(dispatch, "_refused", {})
    launch, calls = kernels._launch, []

    def limited(*args):
        calls.append(args)
        if len(calls) > refused:
            raise OutOfResources(1, 0, "shared memory")
        launch(*args)

    monkeypatch.setattr(kernels, "_launch", limited)
    dispatch.move_alike(sides, shifts, alike.to(DEVICE), 1, GROUPS, (None, None))
    assert len(calls) == refused + 1
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(sides, expected, strict=True))
