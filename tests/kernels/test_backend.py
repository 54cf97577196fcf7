"""Which devices take the Triton kernels, and that the torch path needs no Triton."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from ragcachekit_kernels import backend, dispatch

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import AttentionOptions, ChunkTensors, Place, Plane

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
table, kv, back = (torch.ones(20, 8), torch.zeros(20, 8)), torch.zeros(1, 20, 16), torch.zeros(1, 20, 16)
planes, places = [Plane(kv, 0)], [Place(0, 20)]
dispatch.assembly(planes, places, [ChunkTensors([key])], [table]).run()
dispatch.disassemble(planes, places, [ChunkTensors([back])], [table])
assert torch.equal(kv, key) and torch.equal(back, key)
dispatch.scatter(key[:, :1], key[:, :1], kv, back, [19])
assert torch.equal(kv[:, 19], key[:, 0])
"""


@pytest.fixture(autouse=True)
def _default(monkeypatch):
    monkeypatch.delenv(backend.SETTING, raising=False)


def test_everything_but_captured_attention_works_without_triton():
    environment = {name: value for name, value in os.environ.items() if name != backend.SETTING}
    command = [sys.executable, "-c", WITHOUT_TRITON]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("setting", ["auto", "torch", "triton"])
@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_other_devices_than_cuda_take_the_torch_path(monkeypatch, setting, device):
    monkeypatch.setenv(backend.SETTING, setting)
    monkeypatch.setattr(backend, "_installed", lambda: True)
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
    monkeypatch.setenv(backend.SETTING, setting)
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    monkeypatch.setattr(backend, "_available", lambda: True)
    assert dispatch.uses_triton(torch.device(device)) == triton


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_platforms_other_than_linux_take_the_torch_path(monkeypatch, platform):
    monkeypatch.setattr(backend, "_installed", lambda: True)
    monkeypatch.setattr(sys, "platform", platform)
    assert not dispatch.uses_triton(torch.device("cuda"))
    monkeypatch.setenv(backend.SETTING, "triton")
    with pytest.raises(ValueError, match="not Linux"):
        dispatch.uses_triton(torch.device("cuda"))


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setenv(backend.SETTING, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(backend, "_available", lambda: True)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        dispatch.uses_triton(torch.device("cpu"))
