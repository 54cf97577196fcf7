"""Who may import whom, and what stays light to import."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FREE = ("types", "errors", "config", "files", "forks", "threads")
CHAIN = (
    *("model", "store", "tree", "reports", "link", "generate"),
    *(
        "options",
        "segmenting",
        "prepare",
        "shadow",
        "chunks",
        "answering",
        "stock",
        "chunk_methods",
        "engine",
    ),
)
APART = ("query", "search", "prompt")
BESIDE = ("aio",)  # the engine's asyncio face: above it, below the tops
TOPS = ("cli", "bench")
OURS = ("ragcachekit", "ragcachekit_kernels", "langchain_ragcachekit", "llama_index_ragcachekit")
PUBLIC = "__init__"


def allowed_rooms() -> dict[str, set[str]]:
    """For each room, the rooms it may import (its own is always allowed)."""
    edges = {room: set(FREE) for room in (*FREE, *APART)}
    for i, room in enumerate(CHAIN):
        edges[room] = {*FREE, *CHAIN[:i]}
    edges["segmenting"] |= {"prompt"}
    edges["prepare"] |= set(APART)  # where the prompt room meets the link room
    edges["chunks"] |= {"prompt"}
    edges["chunk_methods"] |= {"query"}
    edges["engine"] |= set(APART)
    edges |= {room: {*FREE, *CHAIN} for room in BESIDE}
    everything = {*FREE, *CHAIN, *APART, *BESIDE, *TOPS, PUBLIC}
    return edges | dict.fromkeys((*TOPS, PUBLIC, "__main__"), everything)


ALLOWED = allowed_rooms()


class Import(NamedTuple):
    file: Path
    line: int
    module: str
    names: tuple[str, ...]

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module} ({', '.join(self.names)})"


def packages() -> list[Path]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [ROOT / path for path in settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]


def imports_of(file: Path, package: Path) -> list[Import]:
    found: list[Import] = []
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            found += [Import(file, node.lineno, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            found.append(Import(file, node.lineno, absolute(node, file, package), names))
    return found


def absolute(node: ast.ImportFrom, file: Path, package: Path) -> str:
    if not node.level:
        return node.module or ""
    here = [package.name, *file.relative_to(package).parent.parts]
    base = here[: len(here) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def all_imports(*names: str) -> list[Import]:
    chosen = [package for package in packages() if package.name in names]
    return [
        i for package in chosen for file in sorted(package.rglob("*.py")) for i in imports_of(file, package)
    ]


def room_of(file: Path) -> str:
    return file.relative_to(ROOT / "ragcachekit").parts[0].removesuffix(".py")


def rooms_imported(found: Import) -> set[str]:
    """``from ragcachekit import x`` is an import of room x if that is one, else of the public names."""
    parts = found.module.split(".")
    if len(parts) > 1:
        return {parts[1]}
    return {name if name in ALLOWED else PUBLIC for name in found.names} or {PUBLIC}


def public_names() -> set[str]:
    tree = ast.parse((ROOT / "ragcachekit" / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    raise AssertionError("ragcachekit/__init__.py has no __all__")


def listed(wrong: list[Import]) -> str:
    return "\n".join(map(str, wrong))


def test_the_wheel_has_the_four_packages() -> None:
    assert tuple(package.name for package in packages()) == OURS
    assert all((package / "__init__.py").is_file() for package in packages()[:2])
    assert not (ROOT / "kernels" / "__init__.py").exists(), "transformers imports a package named kernels"


def test_every_room_is_known_here() -> None:
    rooms = {room_of(file) for file in (ROOT / "ragcachekit").rglob("*.py")}
    assert rooms <= set(ALLOWED), f"give {rooms - set(ALLOWED)} its place among the edges"


def test_rooms_import_only_what_stands_before_them() -> None:
    wrong = [
        found
        for found in all_imports("ragcachekit")
        if found.top == "ragcachekit"
        and not rooms_imported(found) <= {room_of(found.file), *ALLOWED.get(room_of(found.file), ())}
    ]
    assert not wrong, listed(wrong)


def test_kernels_import_nothing_of_ours() -> None:
    others = set(OURS) - {"ragcachekit_kernels"}
    wrong = [found for found in all_imports("ragcachekit_kernels") if found.top in others]
    assert not wrong, listed(wrong)


def test_kernels_are_called_through_dispatch_only() -> None:
    through = ("ragcachekit_kernels.dispatch",)
    wrong = [
        found
        for found in all_imports("ragcachekit")
        if found.top == "ragcachekit_kernels"
        and found.module not in through
        and not (found.module == "ragcachekit_kernels" and found.names == ("dispatch",))
    ]
    assert not wrong, listed(wrong)


def test_the_library_does_not_import_its_integrations() -> None:
    wrong = [
        found
        for found in all_imports("ragcachekit", "ragcachekit_kernels")
        if found.top in OURS[2:] and room_of(found.file) not in TOPS  # the demo runs a LangChain chain
    ]
    assert not wrong, listed(wrong)


def test_integrations_use_only_public_names() -> None:
    public = public_names()
    wrong = [
        found
        for found in all_imports("langchain_ragcachekit", "llama_index_ragcachekit")
        if (found.top == "ragcachekit" and (found.module != "ragcachekit" or not set(found.names) <= public))
        or found.top == "ragcachekit_kernels"
    ]
    assert not wrong, listed(wrong)


def test_integrations_do_not_import_each_other() -> None:
    for one, other in (OURS[2:], OURS[:1:-1]):
        wrong = [found for found in all_imports(one) if found.top == other]
        assert not wrong, listed(wrong)


@pytest.mark.parametrize(
    "module",
    [
        *OURS[:1],
        *OURS[2:],
        "ragcachekit.prompt.messages",
        "ragcachekit.prompt.registry",
    ],
)
def test_importing_does_not_import_torch(module: str) -> None:
    program = f"import sys, {module}; print(*sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def modules_of(package: Path) -> dict[str, Path]:
    """Every file of a package by its dotted name."""
    found = {}
    for file in package.rglob("*.py"):
        parts = [package.name, *file.relative_to(package).with_suffix("").parts]
        found[".".join(parts).removesuffix(".__init__")] = file
    return found


def file_imports(package: Path) -> dict[str, set[str]]:
    """Per file of the package, those it imports: at the top, in functions and for type checkers alike."""
    modules = modules_of(package)
    edges: dict[str, set[str]] = {}
    for name, file in modules.items():
        imports = imports_of(file, package)
        named = {f"{i.module}.{n}" for i in imports for n in i.names}
        # What is imported by name out of a package's __init__ is an import of that file as well.
        whole = {i.module for i in imports if not {f"{i.module}.{n}" for n in i.names} & modules.keys()}
        edges[name] = (named | whole) & modules.keys() - {name}
    return edges


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Files that reach each other, by leaving out again and again those that import none of the rest."""
    left = {name: set(targets) for name, targets in edges.items()}
    for graph in (left, {name: {n for n, t in left.items() if name in t} for name in left}):
        while gone := [name for name in left if not graph[name] & left.keys()]:
            for name in gone:
                del left[name]
    return [set(left)] if left else []


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_no_files_import_each_other_in_a_circle(package: Path) -> None:
    assert circles(file_imports(package)) == []


@pytest.mark.parametrize(
    "source",
    [
        "from sample.one import x",
        "from . import one",
        "def f():\n    from sample import one",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sample.one",
    ],
)
def test_circles_are_seen_however_they_are_imported(tmp_path, source) -> None:
    package = tmp_path / "sample"
    package.mkdir()
    files = {"__init__": "", "one": "from sample import two", "two": source, "beside": "import sample.two"}
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    assert circles(file_imports(package)) == [{"sample.one", "sample.two"}]


SAMPLES = [
    ("from ragcachekit.link.plan import x", "store", {"link"}),
    ("from ..link import plan", "store", {"link"}),
    ("from . import disk", "store", {"store"}),
    ("import ragcachekit.engine as e", "store", {"engine"}),
    ("from ragcachekit import engine, Prompt", "store", {"engine", PUBLIC}),
    ("def f():\n    from ragcachekit.types import Prompt", "store", {"types"}),
]


@pytest.mark.parametrize(("source", "room", "rooms"), SAMPLES)
def test_imports_are_read_in_every_spelling(tmp_path, source, room, rooms) -> None:
    file = tmp_path / "ragcachekit" / room / "sample.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    (found,) = imports_of(file, tmp_path / "ragcachekit")
    assert rooms_imported(found) == rooms


def test_the_edges_are_those_of_the_design() -> None:
    assert ALLOWED["types"] == ALLOWED["prompt"] == set(FREE)
    assert ALLOWED["model"] == set(FREE)
    assert ALLOWED["link"] == {*FREE, "model", "store", "tree", "reports"}
    assert {"generate", "prompt", "query", "search"} <= ALLOWED["engine"]
    assert not {"cli", "bench", "aio"} & ALLOWED["engine"]
