"""What the documentation shows must run, and what it links to must be there."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ragcachekit.policies.base import PlacedChunk, SelectionPolicy

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def load(source: str, path: Path) -> ModuleType:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [t for t in targets if not t.startswith("https://") and not (page.parent / t).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_are_python(page: Path) -> None:
    for block in python_blocks(page):
        if not block.lstrip().startswith('"every"'):  # one line of a dict, shown on its own
            assert compile(block, page.name, "exec") is not None


def test_readme_shows_code_before_line_45() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("```python") < 44


def test_the_policy_of_the_guide_works_as_it_stands(tmp_path: Path) -> None:
    source = python_blocks(ROOT / "docs" / "adding_a_policy.md")[0]
    policy: SelectionPolicy = load(source, tmp_path / "every_of_the_guide.py").Every(4)
    assert policy.name == "every:4"
    placed = [PlacedChunk("a", 0, 3, is_exact=True), PlacedChunk("b", 3, 9, is_exact=False)]
    assert policy.select(placed) == [3, 7, 11]
