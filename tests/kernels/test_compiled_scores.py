"""What the compiler makes of the scoring kernels for Hopper; no GPU is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
import triton

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
pytestmark = pytest.mark.skipif(
    not all((BIN / tool).exists() for tool in ("ptxas", "cuobjdump", "nvdisasm")),
    reason="this Triton comes without NVIDIA's assembler and disassembler",
)
SHARED = 228 * 1024
"""Bytes of shared memory of one of Hopper's multiprocessors; 1 KiB per program is the system's."""


def compiled(folder, *cases):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    script = Path(__file__).with_name("compile_scores.py")
    command = [sys.executable, str(script), str(folder), *cases]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def check(kernels):
    for name, found in kernels.items():
        assert found["stack"] == found["spills"] == 0, (name, found)
        assert found["shared"] <= SHARED - 1024, (name, found)
        if name != "_deviation_kernel":
            assert found["hgmma"] > 0, (name, found)
            assert found["copies"] == found["wide_copies"] > 0, (name, found)
        assert found["wide_loads"] > 0, (name, found)


@pytest.mark.soak
def test_no_spills_tensor_cores_and_wide_loads(tmp_path):
    found = compiled(tmp_path, "all keys", "spans", "deviation")
    for kernels in found.values():
        check(kernels)
    assert [list(kernels) for kernels in found.values()] == [
        ["columns_kernel", "log_sums_kernel"],
        ["columns_kernel"],
        ["_deviation_kernel"],
    ]
    for case in ("all keys", "spans"):
        made = found[case]["columns_kernel"]
        assert 2 * made["threads"] * made["registers"] <= 65536  # two programs to a multiprocessor
        assert 2 * (made["shared"] + 1024) <= SHARED


@pytest.mark.soak
@pytest.mark.parametrize(
    "case",
    [
        "64 dimensions",
        "256 dimensions",
        "256 dimensions, all options",
        "all options",
        "float16, few rows",
        "many rows",
    ],
)
def test_other_cases_do_not_spill_either(tmp_path, case):
    (kernels,) = compiled(tmp_path, case).values()
    check(kernels)


@pytest.mark.soak
def test_float32_does_not_spill(tmp_path):
    (kernels,) = compiled(tmp_path, "float32").values()
    assert kernels["columns_kernel"]["hgmma"] > 0  # three products of rounded operands each
    for found in kernels.values():
        assert found["stack"] == found["spills"] == 0
        assert found["copies"] == found["wide_copies"] > 0
