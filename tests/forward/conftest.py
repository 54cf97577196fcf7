"""Both ways through the kernels: in torch, and in Triton (interpreted on a CPU, compiled on a GPU)."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["torch", "triton"])
def path(request, monkeypatch):
    if request.param == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", request.param)
    return request.param


@pytest.fixture
def triton(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")
