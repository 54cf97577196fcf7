"""What the compiler makes of the attention kernels for Hopper; no GPU is needed for that."""

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
SHARED = 227 * 1024
STACK = 64
"""Bytes that may lie in local memory outside of the loop over keys: set up once per tile."""


def compiled(folder, *cases):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    script = Path(__file__).with_name("compile_attention.py")
    command = [sys.executable, str(script), str(folder), *cases]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def check(found):
    kernel, loop = found["attention_kernel"], found["loop"]
    assert loop["spills"] == 0, found
    assert kernel["stack"] <= STACK, found
    assert kernel["shared"] <= SHARED, found
    assert loop["hgmma"] > 0, found
    assert kernel["copies"] == kernel["wide_copies"], found
    assert (loop["tensor_loads"] > 0) != (loop["copies"] > 0), found
    assert kernel["wide_loads"] > 0, found


@pytest.mark.soak
def test_the_loop_does_not_spill_and_keeps_the_tensor_cores_fed(tmp_path):
    found = compiled(tmp_path, "pointers", "table, split")
    for kernels in found.values():
        check(kernels)
    assert found["pointers"]["loop"]["tensor_loads"] == 2  # one of keys, one of values
    assert found["pointers"]["loop"]["hgmma"] == 16
    assert found["table, split"]["loop"]["copies"] == 8
    merge = found["table, split"]["merge_kernel"]
    assert merge["stack"] == merge["spills"] == 0
    assert merge["wide_loads"] > 0


@pytest.mark.soak
@pytest.mark.parametrize(
    "case",
    [
        "64",
        "64, table",
        "80",
        "96",
        "192",
        "192, table",
        "256",
        "256, table",
        "window",
        "all options",
        "all options, table",
        "all options, 256",
        "float16",
    ],
)
def test_other_cases_do_not_spill_either(tmp_path, case):
    (found,) = compiled(tmp_path, case).values()
    check(found)
