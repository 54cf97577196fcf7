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

from ragcachekit.commands.console import show
from ragcachekit.commands.report import BenchReport

SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "kernels" / "compile_hopper.py"
FIELDS = ("registers", "stack", "shared", "threads", "hgmma", "copies", "wide_copies", "wide_loads")


def rows() -> list[dict[str, Any]]:
    """One per kernel and launch."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPT), folder]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [
        {"kernel": name.removesuffix("_kernel"), "case": case} | {field: made[field] for field in FIELDS}
        for case, kernels in json.loads(run.stdout).items()
        for name, made in kernels.items()
    ]


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
