"""What the compiler makes of the kernels that move KV, for Hopper; no GPU is needed for that."""

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


def compiled(folder, *cases):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, str(Path(__file__).with_name("compile_moves.py")), str(folder), *cases]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def check(case, made):
    """No spills; rows go in and out 16 bytes at a time (``storing``: scales and small tiles not)."""
    assert made["stack"] == made["spills"] == 0, (case, made)
    assert made["wide_loads"] > 0, (case, made)
    if case.startswith("storing, "):
        assert made["wide_reads"] > 0, (case, made)
        assert made["wide_writes"] > 0, (case, made)
        return
    assert made["reads"] == made["wide_reads"], (case, made)
    assert made["writes"] == made["wide_writes"] > 0, (case, made)


def in_flight(made):
    """Bytes of rows that a multiprocessor has on their way, as far as registers limit its programs."""
    programs = 65536 // (made["threads"] * made["registers"])
    return programs * made["threads"] * made["wide_reads"] * 16


@pytest.mark.soak
def test_no_spills_and_wide_accesses(tmp_path):
    found = compiled(
        tmp_path, "assembly", "assembly, int8", "assembly, neighbours", "storing, int8", "scatter, table"
    )
    assert len(found) == 5
    for case, made in found.items():
        check(case, made)
    # 3.35 TB/s over 132 multiprocessors, half of it reads, for the 1 us that memory under load takes
    assert in_flight(found["assembly"]) > 5 * 12_700


@pytest.mark.soak
@pytest.mark.parametrize(
    "case",
    [
        "assembly, fp8",
        "assembly, half of it",
        "assembly, a quarter, neighbours",
        "assembly, 64 dimensions",
        "assembly, 256 dimensions",
        "assembly, 96 dimensions",
        "assembly, latent",
        "storing",
        "storing, fp8",
        "storing, int8, neighbours",
        "storing, int8, half of it",
        "scatter",
    ],
)
def test_other_cases_too(tmp_path, case):
    ((name, made),) = compiled(tmp_path, case).items()
    check(name, made)
