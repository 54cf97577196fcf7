"""What the compiler makes of the kernels for Hopper; no GPU is needed for that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
import triton

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not all((BIN / tool).exists() for tool in ("ptxas", "cuobjdump", "nvdisasm")),
        reason="this Triton comes without NVIDIA's assembler and disassembler",
    ),
]
SHARED = 227 * 1024
"""Bytes of shared memory that a program may have."""

STACK = 64
"""Bytes that attention may keep in local memory outside of the loop over keys: set up once per tile."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, str(Path(__file__).with_name("compile_hopper.py")), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def of(compiled, kind):
    found = {case: kernels for case, kernels in compiled.items() if case.split(",")[0] == kind}
    assert found
    return [(case, name, made) for case, kernels in found.items() for name, made in kernels.items()]


def test_attention_feeds_the_tensor_cores_without_spills_in_its_loop(compiled):
    for case, name, made in of(compiled, "attention"):
        assert made["loop_spills"] == 0, (case, made)
        assert made["stack"] <= STACK, (case, made)
        assert made["shared"] <= SHARED, (case, made)
        assert made["wide_loads"] > 0, (case, made)
        if name == "attention_kernel":
            assert made["hgmma"] > 0, (case, made)
            assert made["copies"] == made["wide_copies"], (case, made)
            assert (made["copies"] > 0) == ("pointers" in case), (case, made)
    assert set(compiled["attention, split, float16"]) == {"attention_kernel", "merge_kernel"}


def test_scores_do_not_spill_and_copy_16_bytes_at_a_time(compiled):
    for case, name, made in of(compiled, "scores"):
        assert made["stack"] == made["spills"] == 0, (case, name, made)
        assert made["shared"] <= SHARED, (case, name, made)
        assert made["copies"] == made["wide_copies"] > 0, (case, name, made)
    assert set(compiled["scores, all keys"]) == {"columns_kernel", "log_sums_kernel"}
    for case in ("scores, all keys", "scores, spans"):
        made = compiled[case]["columns_kernel"]
        assert made["hgmma"] > 0
        assert 2 * made["threads"] * made["registers"] <= 65536, "two programs to a multiprocessor"
        assert 2 * (made["shared"] + 1024) <= SHARED + 1024


def test_rows_are_moved_16_bytes_at_a_time_without_spills(compiled):
    for case, _, made in of(compiled, "assembly"):
        assert made["stack"] == made["spills"] == 0, (case, made)
        assert made["wide_loads"] > 0, (case, made)
        assert made["wide_stores"] > 0, (case, made)


def test_moves_do_not_spill(compiled):
    for case, _, made in of(compiled, "moves"):
        assert made["stack"] == made["spills"] == 0, (case, made)
        assert made["shared"] <= SHARED, (case, made)
