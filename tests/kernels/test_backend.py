"""Which devices take the Triton kernels, what happens where Triton gives up, and that torch needs none."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from ragcachekit_kernels import dispatch, launch
from ragcachekit_kernels.dispatch import AttentionOptions, Place, Places

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

WITHOUT_TRITON = """
import sys
from ragcachekit_kernels import dispatch
assert "triton" not in sys.modules, "imported with dispatch"
sys.modules["triton"] = None
import torch
from ragcachekit_kernels.dispatch import AttentionOptions, Place, Places, Rotation

assert not dispatch.uses_triton(torch.device("cuda")) and not dispatch.uses_triton(torch.device("cpu"))
query, key, options = torch.randn(2, 2, 16), torch.randn(1, 20, 16), AttentionOptions(0.3)
out = dispatch.sparse_attention(query, key, key, [3, 19], options)
want = ((query[:, 1] @ key[0].T) * 0.3).softmax(-1) @ key[0]
torch.testing.assert_close(out[:, 1], want)
sums = dispatch.column_scores(query, key, [3, 19], options)
assert abs(float(sums.sum()) - 4) < 1e-4 and float(dispatch.span_sums(sums, [(0, 20)])) > 3.9
mass = dispatch.context_mass(query, key, [3, 19], [3, 17], options)
assert abs(float(mass.inter.sum() + mass.intra) - 4) < 1e-4
assert not dispatch.kv_deviation(key[:, [3, 19]], key, [3, 19]).any()
kv, places = torch.zeros(1, 20, 16), Places((Place(0, 20),))
dispatch.assemble(kv, [key], places, Rotation(torch.ones(20, 8), torch.zeros(20, 8)))
assert torch.equal(kv, key)
"""


def test_everything_works_without_triton():
    environment = {name: value for name, value in os.environ.items() if name != dispatch.SETTING}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("setting", ["auto", "torch", "triton"])
@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_other_devices_than_cuda_take_the_torch_path(monkeypatch, setting, device):
    monkeypatch.setenv(dispatch.SETTING, setting)
    monkeypatch.setattr(dispatch, "_installed", lambda: True)
    assert not dispatch.uses_triton(torch.device(device))


@pytest.mark.parametrize(
    ("setting", "interpreted", "device", "triton"),
    [
        ("auto", "0", "cuda", True),
        ("auto", "1", "cpu", False),
        ("torch", "0", "cuda", False),
        ("triton", "0", "cuda", True),
        ("triton", "1", "cpu", True),
    ],
)
def test_the_setting_decides_where_triton_runs(monkeypatch, setting, interpreted, device, triton):
    monkeypatch.setenv(dispatch.SETTING, setting)
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    monkeypatch.setattr(dispatch, "_installed", lambda: True)
    assert dispatch.uses_triton(torch.device(device)) == triton


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_platforms_other_than_linux_take_the_torch_path(monkeypatch, platform):
    monkeypatch.delenv(dispatch.SETTING, raising=False)
    monkeypatch.setattr(dispatch, "_installed", lambda: True)
    monkeypatch.setattr(sys, "platform", platform)
    assert not dispatch.uses_triton(torch.device("cuda"))
    monkeypatch.setenv(dispatch.SETTING, "triton")
    with pytest.raises(ValueError, match="not Linux"):
        dispatch.uses_triton(torch.device("cuda"))


@pytest.mark.parametrize(
    ("setting", "interpreted", "message"), [("triton", "0", "TRITON_INTERPRET=1"), ("fast", "1", "not known")]
)
def test_settings_that_cannot_be_are_refused(monkeypatch, setting, interpreted, message):
    monkeypatch.setenv(dispatch.SETTING, setting)
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    monkeypatch.setattr(dispatch, "_installed", lambda: True)
    with pytest.raises(ValueError, match=message):
        dispatch.uses_triton(torch.device("cpu"))


class Refused:
    """Stands in for a kernel that cannot be launched."""

    def __init__(self, error):
        self.error, self.launches = error, 0

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *values, **named):
        self.launches += 1
        raise self.error


class TestTritonGivesUp:
    """Torch answers, the choice names the reason, the log does once."""

    @pytest.fixture(autouse=True)
    def triton(self, monkeypatch):
        pytest.importorskip("triton")
        monkeypatch.setenv(dispatch.SETTING, "triton")
        monkeypatch.setattr(dispatch, "_refused", {})

    @staticmethod
    def errors():
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError

        return [
            OutOfResources(260_000, 232_448, "shared memory"),
            PTXASError("ptxas died"),
            CompilationError("", None, "no"),
            RuntimeError("PassManager::run failed"),
        ]

    @staticmethod
    def tensors():
        random = torch.Generator().manual_seed(3)
        return [torch.randn(2, n, 16, generator=random).to(DEVICE) for n in (2, 20, 20)]

    @staticmethod
    def modules():
        from ragcachekit_kernels import assembly, attention, scores

        return assembly, attention, scores

    @pytest.mark.parametrize("number", range(4))
    def test_attention_answers_and_names_the_reason(self, monkeypatch, caplog, number):
        refused = Refused(error := self.errors()[number])
        query, key, value = self.tensors()
        want = dispatch.sparse_attention(query, key, value, [3, 19], AttentionOptions(scale=0.3))
        monkeypatch.setattr(self.modules()[1], "attention_kernel", refused)
        for _ in range(3):
            out = dispatch.sparse_attention(query, key, value, [3, 19], AttentionOptions(scale=0.3))
            torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        assert refused.launches == 1
        assert len(caplog.records) == 1
        choice = dispatch.attention_choice(query, key, value)
        assert choice == f"torch: Triton gave up ({type(error).__name__})"
        assert dispatch.attention_choice(query.half(), key.half(), value.half()) == "triton"

    @pytest.mark.parametrize("error", [RuntimeError("CUDA error"), TypeError("wrong")])
    def test_other_errors_are_not_hidden(self, monkeypatch, error):
        monkeypatch.setattr(self.modules()[1], "attention_kernel", Refused(error))
        with pytest.raises(type(error)):
            dispatch.sparse_attention(*self.tensors(), [3, 19], AttentionOptions(scale=0.3))
        assert dispatch.attention_choice(*self.tensors()) == "triton"

    def results(self):
        query, key, _ = self.tensors()
        options, out = AttentionOptions(scale=0.3), torch.zeros(2, 30, 16, device=DEVICE)
        dispatch.assemble(out, [key], Places((Place(5, 20),)))
        return [
            dispatch.column_scores(query, key, [3, 19], options),
            *dispatch.context_mass(query, key, [3, 19], [3, 17], options),
            out,
        ]

    def test_every_other_kernel_too(self, monkeypatch):
        expected = self.results()
        for module in self.modules():
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                monkeypatch.setattr(module, name, Refused(self.errors()[0]))
        for one, other in zip(expected, self.results(), strict=True):
            torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-4, atol=1e-5)
        assert "OutOfResources" in dispatch.choice("scores", *self.tensors()[:2])

    def test_every_launch_is_on_the_tensors_device(self, monkeypatch):
        """Within a guard for it: Triton launches on the current device."""
        inside, seen = [], []

        class Guard:
            def __init__(self, device):
                assert device.type == DEVICE.type

            def __enter__(self):
                inside.append(self)

            def __exit__(self, *error):
                inside.pop()

        def around(kernel):
            class Kernel:
                def __getitem__(self, grid):
                    seen.append((kernel.__name__, len(inside)))
                    return kernel[grid]

            return Kernel()

        names = set()
        for module in self.modules():
            monkeypatch.setattr(module, "launching_on", Guard)
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                names.add(getattr(module, name).__name__)
                monkeypatch.setattr(module, name, around(getattr(module, name)))
        self.results()
        query, key, value = self.tensors()
        at = dispatch.Rows((3, 19)).on(DEVICE)
        self.modules()[1].attention(query, key, value, at, AttentionOptions(scale=0.3), splits=2)
        assert {name for name, _ in seen} == names
        assert all(depth == 1 for _, depth in seen)


@pytest.mark.parametrize(("device", "guarded"), [("cuda:0", False), ("cuda:1", True), ("cpu", False)])
def test_the_guard_changes_the_device_only_where_it_differs(monkeypatch, device, guarded):
    entered = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda given: entered.append(given) or nullcontext())
    with launch.launching_on(torch.device(device)):
        assert entered == ([torch.device(device)] if guarded else [])
