"""Every block of Python in the documentation runs, page by page, or says why it does not."""

import ast
import asyncio
import inspect
import re
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest
from page_names import PLACES, names_for

from ragcachekit.store.base import KVStore

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^>]+) -->\n+)?```python\n(?P<source>.*?)```", re.DOTALL)


class Block(NamedTuple):
    line: int
    source: str
    why: str | None  # it is not run


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(text[: found.start("source")].count("\n"), found["source"], found["why"])
        for found in _BLOCK.finditer(text)
    ]


def run(block: Block, page: Path, names: dict[str, Any], folder: Path) -> None:
    source = block.source.replace('"sample"', repr(str(folder)))
    for place in PLACES:
        source = source.replace(f'"{place}"', repr(str(folder)))
    lines = "\n" * block.line + source  # so that a traceback has the page's lines
    code = compile(lines, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    awaited = FunctionType(code, names)()
    if inspect.iscoroutine(awaited):
        asyncio.run(awaited)


WITH_CODE = [page for page in PAGES if any(block.why is None for block in blocks(page))]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_blocks_run(
    page: Path,
    tiny_folder: Path,
    no_loop: None,
    at_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "docs").mkdir()  # a reader stands in a folder with texts
    for text in ("faq.md", "index.md", "models.md", "papers.md", "tree.md", "versions.md"):
        (tmp_path / "docs" / text).symlink_to(ROOT / "docs" / text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with names_for(page, tiny_folder) as names:
        for block in blocks(page):
            if block.why is None:
                run(block, page, names, tiny_folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_that_is_not_run_is_named(page: Path) -> None:
    assert len(re.findall(r"^```python$", page.read_text(), re.MULTILINE)) == len(blocks(page))
    assert all(len(block.why) > 10 for block in blocks(page) if block.why is not None)


def test_most_blocks_run() -> None:
    every = [block for page in PAGES for block in blocks(page)]
    assert sum(block.why is None for block in every) > 0.8 * len(every)


def test_the_store_of_the_guide_overrides_the_contract_as_it_is() -> None:
    """A method with other parameters would fail at its first call, in a background job."""
    names: dict[str, Any] = {}
    source = blocks(ROOT / "docs" / "own_store.md")[0].source
    exec(source[: source.index("\nrag = ")] if "\nrag = " in source else source, names)
    methods = {name: one for name, one in vars(names["DictStore"]).items() if hasattr(KVStore, name)}
    assert {"get", "put", "keys", "discard", "forget"} <= methods.keys()
    for name, method in methods.items():
        if not name.startswith("__"):
            assert list(inspect.signature(method).parameters) == list(
                inspect.signature(getattr(KVStore, name)).parameters
            ), name
