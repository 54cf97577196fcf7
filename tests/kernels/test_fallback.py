"""Triton that cannot compile or launch a kernel: torch answers, the choice says so, the log does once."""

from __future__ import annotations

import pytest
import torch

from ragcachekit_kernels import backend, dispatch, launch
from ragcachekit_kernels.dispatch import AttentionOptions, ChunkTensors, DeviceRows, KVTable, Place, Plane
from ragcachekit_kernels.placement import moving

pytest.importorskip("triton")
from triton.compiler.errors import CompilationError
from triton.runtime.errors import InterpreterError, OutOfResources, PTXASError

from ragcachekit_kernels.attention import row_attention
from ragcachekit_kernels.placement import assembly, scatter, storing
from ragcachekit_kernels.scores import column_scores, deviation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOO_LARGE = OutOfResources(260_000, 232_448, "shared memory")


@pytest.fixture(autouse=True)
def triton_path(monkeypatch):
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")
    monkeypatch.setattr(backend, "_refused", {})


class Refused:
    """Stands in for a kernel that cannot be launched."""

    def __init__(self, error=TOO_LARGE):
        self.error, self.launches = error, 0

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *values, **named):
        self.launches += 1
        raise self.error


def tensors(rows=2):
    random = torch.Generator().manual_seed(3)
    return [torch.randn(2, n, 16, generator=random).to(DEVICE) for n in (rows, 20, 20)]


def attend(query, key, value):
    scores = (query @ key[:, :20].mT * 0.3).double()
    scores[:, 0, 4:], scores[:, 1, 20:] = float("-inf"), float("-inf")
    return scores.softmax(-1) @ value.double()


@pytest.mark.parametrize(
    "error",
    [
        TOO_LARGE,
        PTXASError("ptxas died"),
        CompilationError("", None, "no"),
        RuntimeError("PassManager::run failed"),
    ],
)
def test_attention_answers_and_says_why(monkeypatch, caplog, error):
    refused = Refused(error)
    monkeypatch.setattr(row_attention, "attention_kernel", refused)
    query, key, value = tensors()
    for _ in range(3):
        out = dispatch.sparse_attention(query, key, value, [3, 19], AttentionOptions(scale=0.3))
        torch.testing.assert_close(out.double(), attend(query, key, value), rtol=1e-5, atol=1e-5)
    assert refused.launches == 1
    assert len(caplog.records) == 1
    choice = dispatch.attention_choice(query, key, value)
    assert choice == f"torch: Triton gave up ({type(error).__name__})"
    assert dispatch.attention_choice(query.half(), key.half(), value.half()) == "triton"


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), InterpreterError("wrong"), TypeError("wrong")])
def test_other_errors_are_not_hidden(monkeypatch, error):
    monkeypatch.setattr(row_attention, "attention_kernel", Refused(error))
    with pytest.raises(type(error)):
        dispatch.sparse_attention(*tensors(), [3, 19], AttentionOptions(scale=0.3))
    assert dispatch.attention_choice(*tensors()) == "triton"


def test_scores_deviations_and_sums(monkeypatch):
    query, key, _ = tensors()
    both = {}
    for path in ("triton", "refused"):
        if path == "refused":
            for module, name in (
                (column_scores, "columns_kernel"),
                (column_scores, "log_sums_kernel"),
                (deviation, "_deviation_kernel"),
                (deviation, "_span_sums_kernel"),
            ):
                monkeypatch.setattr(module, name, Refused())
        both[path] = [
            dispatch.column_scores(query, key, [3, 19], AttentionOptions(scale=0.3)),
            *dispatch.context_mass(query, key, [3, 19], [3, 17], AttentionOptions(scale=0.3)),
            dispatch.kv_deviation(query, key, [3, 19]),
            dispatch.span_sums(key[0, :, 0], [(0, 20)]),
        ]
    for one, other in zip(*both.values(), strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-4, atol=1e-5)
    assert "OutOfResources" in backend.choice("scores", query, key)


class TestMoves:
    def layout(self, dtype=torch.float32):
        kv = [torch.zeros(2, 20, 16, device=DEVICE, dtype=dtype) for _ in range(2)]
        chunk = [torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(i)).to(kv[0]) for i in (0, 1)]
        return kv, chunk, ([Plane(x) for x in kv], [Place(5, 9)], [ChunkTensors(chunk)], [])

    def test_there_and_back(self, monkeypatch):
        refused = Refused()
        monkeypatch.setattr(assembly, "_move_kernel", refused)
        kv, chunk, arguments = self.layout()
        dispatch.assembly(*arguments).run()
        assert all(torch.equal(x[:, 5:14], y) for x, y in zip(kv, chunk, strict=True))
        for x in kv:
            x += 1
        dispatch.disassemble(*arguments)
        assert all(torch.equal(x[:, 5:14], y) for x, y in zip(kv, chunk, strict=True))
        assert refused.launches == 1
        assert not moving._has_kernels(moving.Layout(*arguments))
        assert moving._has_kernels(moving.Layout(*self.layout(torch.float16)[2]))

    def test_eight_bits(self, monkeypatch):
        monkeypatch.setattr(storing, "_quantise_kernel", Refused())
        kv, _, (planes, places, _, tables) = self.layout()
        kv[0][:] = 127.0
        small = [torch.zeros(2, 9, 16, dtype=torch.int8, device=DEVICE) for _ in kv]
        scales = [torch.zeros(2, 9, 1, device=DEVICE) for _ in kv]
        dispatch.disassemble(planes, places, [ChunkTensors(small, scales)], tables)
        assert bool((small[0] == 127).all())

    def test_rows(self, monkeypatch):
        monkeypatch.setattr(scatter, "_scatter_kernel", Refused())
        new, into, other = tensors()
        dispatch.scatter(new, new, into, other, [3, 19])
        assert torch.equal(into[:, [3, 19]], new)
        assert torch.equal(other[:, [3, 19]], new)


class TestThroughATable:
    rows = DeviceRows(torch.zeros(2, dtype=torch.int32), torch.ones(1, dtype=torch.int32))

    def scatter(self, dtype=torch.float32):
        new = torch.zeros(2, 2, 16, dtype=dtype)
        dispatch.scatter_at(new, new, KVTable(torch.zeros(1, 4, dtype=torch.int64), dtype), 0, self.rows)

    def test_torch_does_not_go_by_tables(self, monkeypatch):
        monkeypatch.setenv("RAGCACHEKIT_KERNELS", "torch")
        with pytest.raises(ValueError, match="needs Triton"):
            self.scatter()

    def test_other_types_are_refused(self):
        with pytest.raises(ValueError, match="float64"):
            self.scatter(torch.float64)


class DeadlineExecutor:
    """Stands in for ``torch.cuda.device``."""

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


@pytest.mark.parametrize(("device", "guarded"), [("cuda:0", False), ("cuda:1", True), ("cpu", False)])
def test_launches_go_to_the_tensors_device(monkeypatch, device, guarded):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", DeadlineExecutor)
    with launch.launching_on(torch.device(device)) as guard:
        assert isinstance(guard, DeadlineExecutor) == guarded
        assert not guarded or guard.device == torch.device(device)


class Entered:
    """Notes every kernel that is launched within a guard for its tensors' device."""

    def __init__(self):
        self.inside, self.seen = 0, []

    def __call__(self, device):
        assert device.type == DEVICE.type
        return self

    def __enter__(self):
        self.inside += 1

    def __exit__(self, *error):
        self.inside -= 1

    def around(self, kernel):
        guard = self

        class Kernel:
            def __getitem__(self, grid):
                guard.seen.append((kernel.__name__, guard.inside))
                return kernel[grid]

        return Kernel()


def test_every_launch_is_guarded(monkeypatch):
    entered, modules = (
        Entered(),
        (assembly, column_scores, deviation, row_attention, scatter, storing),
    )
    names = set()
    for module in modules:
        monkeypatch.setattr(module, "launching_on", entered)
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            names.add(getattr(module, name).__name__)
            monkeypatch.setattr(module, name, entered.around(getattr(module, name)))
    query, key, value = tensors()
    at = dispatch.Rows((3, 19)).on(DEVICE)
    row_attention.attention(query, key, value, at, AttentionOptions(scale=0.3), splits=2)
    dispatch.column_scores(query, key, [3, 19], AttentionOptions(scale=0.3))
    dispatch.kv_deviation(query, key, [3, 19])
    dispatch.span_sums(key[0, :, 0], [(0, 20)])
    kv, _, arguments = TestMoves().layout()
    dispatch.assembly(*arguments).run()
    small = [torch.zeros(2, 9, 16, dtype=torch.int8, device=DEVICE) for _ in kv]
    scales = [torch.zeros(2, 9, 1, device=DEVICE) for _ in kv]
    dispatch.disassemble(*arguments[:2], [ChunkTensors(small, scales)], [])
    dispatch.scatter(query, query, key.clone(), value.clone(), [3, 19])
    entry = [key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0)]
    dispatch.scatter_at(query, query, KVTable(torch.tensor([entry], device=DEVICE), key.dtype), 0, at)
    assert {name for name, _ in entered.seen} == names
    assert all(inside == 1 for _, inside in entered.seen)
