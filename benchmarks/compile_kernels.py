"""What NVIDIA's assembler makes of every Triton kernel for Hopper (sm_90); no GPU is needed.

Registers per thread, bytes of stack, shared memory, matrix instructions and widths of copies, of the
launches that the library makes. ``--json benchmarks/results/kernels-sm90.json`` writes the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.console import show

SCRIPTS = Path(__file__).resolve().parent.parent / "tests" / "kernels"
FIELDS = ("registers", "stack", "shared", "threads", "hgmma", "copies", "wide_copies", "wide_loads")


def compiled(script: str) -> dict[str, Any]:
    """Case to kernel to findings, of all cases of one script; it must not run in Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    names = f"import {script}; print('\\n'.join({script}.CASES))"
    listed = subprocess.run(
        [sys.executable, "-c", names],
        cwd=SCRIPTS,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPTS / f"{script}.py"), folder, *listed.stdout.splitlines()]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def rows() -> list[dict[str, Any]]:
    """One per launch."""
    out = []
    for script in ("compile_attention", "compile_scores", "compile_moves"):
        for case, kernels in compiled(script).items():
            for kernel, found in kernels.items() if "registers" not in kernels else [(case, kernels)]:
                if "registers" in found:
                    name = kernel.strip("_").removesuffix("_kernel")
                    out.append({"kernel": name, "case": case} | {field: found[field] for field in FIELDS})
    return out


def main() -> None:
    """Compile, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = BenchReport("kernels-compiled", "sm_90, 32 query heads, 8 KV heads", 0, tuple(rows()))
    show(report.table("Kernels as compiled for Hopper; bytes of stack and of shared memory"))
    if arguments.json is not None:
        report.write_json(arguments.json)


if __name__ == "__main__":
    main()
