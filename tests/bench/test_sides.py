"""What ships imports nothing of what proves our claims: the sample world, its reader, simulations."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ragcachekit

ROOT = Path(ragcachekit.__file__).parent
PROOFS = (
    *("world", "demo", "manual", "eviction", "planner", "store_bench", "kernel", "families", "family_"),
    *("check_families", "second_check", "calibrate_check", "device_timing", "fidelity_sweeps", "proofs_cli"),
)


def is_proof(module: str) -> bool:
    name = module.removeprefix("ragcachekit.bench.")
    return name != module and name.startswith(PROOFS)


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


SHIPPED = [
    file
    for file in sorted(ROOT.rglob("*.py"))
    if not is_proof("ragcachekit." + ".".join(file.relative_to(ROOT).with_suffix("").parts))
]


def test_there_are_both_sides() -> None:
    assert ROOT / "bench" / "ask.py" in SHIPPED
    assert ROOT / "bench" / "world.py" not in SHIPPED
    assert ROOT / "bench" / "proofs_cli" / "world.py" not in SHIPPED


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_what_ships_imports_no_proof(file: Path) -> None:
    assert not [module for module in imports(file) if is_proof(module)]


def test_the_prompt_is_what_the_reader_was_trained_on() -> None:
    from ragcachekit.bench import reading_prompt, world

    assert (reading_prompt.INSTRUCTION, reading_prompt.SEPARATOR) == (world.INSTRUCTION, world.SEPARATOR)
