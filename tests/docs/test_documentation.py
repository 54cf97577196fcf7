"""Pages link to what is there, name everything public, and form a site."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from ragcachekit.policies.base import PlacedChunk, SelectionPolicy

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*ROOT_PAGES, *sorted(DOCS.rglob("*.md")), DOCS / "llms.txt"]
OWN = ("ragcachekit", *(f"ragcachekit.{room}" for room in ("telemetry", "server", "cluster")))
PACKAGES = (*OWN, "langchain_ragcachekit", "llama_index_ragcachekit")


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


def links(page: Path) -> list[tuple[str, str]]:
    """Internal targets: a path, empty for the page itself, and an anchor, or empty."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]*)\)", text)
    return [(path, anchor) for path, _, anchor in (t.partition("#") for t in found) if "://" not in path]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as Markdown's toc makes them."""
    from markdown.extensions.toc import slugify, unique

    seen: set[str] = set()
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        unique(slugify(re.sub(r"`|\*\*|\[([^]]*)\]\([^)]*\)", r"\1", heading), "-"), seen)
    return seen


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    for path, anchor in links(page):
        target = page if not path else page.parent / path
        if target == DOCS / "changelog.md":  # the site makes it of this one
            target = ROOT / "CHANGELOG.md"
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            missing.append(f"{path}#{anchor}")
    assert missing == []


def nav_pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in nav_pages(part)]


def test_every_page_is_in_the_site_and_in_llms_txt() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = nav_pages(settings["nav"])
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted({*pages, "changelog.md"})
    named = {path for path, _ in links(DOCS / "llms.txt")}
    assert named == pages


def described() -> list[str]:
    """What the API pages take from docstrings: objects, or whole modules."""
    pages = [page.read_text() for page in (DOCS / "api").glob("*.md")]
    return re.findall(r"^::: ([\w.]+)$", "\n".join(pages), re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package: str) -> None:
    known, module = set(described()), importlib.import_module(package)
    if package in known:  # all of its __all__
        return
    homes = {name: getattr(getattr(module, name), "__module__", "") for name in module.__all__}
    assert [name for name, home in homes.items() if not {f"{package}.{name}", home} & known] == []


def test_described_names_exist() -> None:
    for path in described():
        module, _, name = path.rpartition(".")
        if not module or not hasattr(importlib.import_module(module), name):
            importlib.import_module(path)


def test_what_the_page_of_the_papers_names_is_there() -> None:
    rows = [line for line in (DOCS / "papers.md").read_text().splitlines() if "`" in line and "|" in line]
    assert len(rows) > 30
    for row in rows:
        *_, code, tests, differs, _ = row.split("|")
        assert ".py`" in code, row
        assert "`tests/" in tests, row
        assert differs.strip(), row
        for path, name in re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row):
            file = next(
                (root / path for root in (ROOT / "ragcachekit", ROOT) if (root / path).exists()), None
            )
            assert file is not None, path
            assert not name or re.search(rf"^ *(async def|def|class) {name}\b", file.read_text(), re.M), name


def test_readme_is_short_and_shows_code_before_line_45() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 700
    assert text.splitlines().index("```python") < 44


def test_the_policy_of_the_guide_works_as_it_stands(tmp_path: Path) -> None:
    source = python_blocks(DOCS / "adding_a_policy.md")[0]
    policy: SelectionPolicy = load(source, tmp_path / "every_of_the_guide.py").Every(4)
    assert policy.name == "every:4"
    placed = [PlacedChunk("a", 0, 3, is_exact=True), PlacedChunk("b", 3, 9, is_exact=False)]
    assert policy.select(placed) == [3, 7, 11]
