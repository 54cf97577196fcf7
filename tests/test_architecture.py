"""Who may import whom, and what stays light to import."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FREE = (
    *("types", "errors", "config", "files", "threads", "cancellation", "json_store"),
    *("reports", "observers", "frameworks"),
)
CHAIN = (
    *("prompt", "model", "store", "prefix_tree", "policies", "plan", "forward", "encode"),
    *("generate", "plots", "quality", "engine", "telemetry", "server", "cluster", "commands"),
)
APART = ("retrieval",)  # joined by the engine
PUBLIC = "__init__"
PLUMBING = (
    "ragcachekit.frameworks",
    "ragcachekit.retrieval.plumbing",
)  # what the integrations share beside the public names
OURS = ("ragcachekit", "ragcachekit_kernels", "langchain_ragcachekit", "llama_index_ragcachekit")
NOT_SHIPPED = ("benchmarks", "examples", "tests")


def allowed_rooms() -> dict[str, set[str]]:
    """For each room, the rooms it may import (its own is always allowed)."""
    edges = {room: set(FREE) for room in (*FREE, *APART)}
    for i, room in enumerate(CHAIN):
        edges[room] = {*FREE, *CHAIN[:i]}
    for room in CHAIN[CHAIN.index("engine") :]:
        edges[room] |= {*APART, PUBLIC}
    edges["engine"] -= {PUBLIC}
    return edges | {room: {*FREE, *CHAIN, *APART, PUBLIC} for room in (PUBLIC, "__main__")}


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


@functools.cache
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


def test_the_wheel_has_the_four_packages_and_llama_index_s_paths() -> None:
    assert tuple(package.name for package in packages()) == (*OURS, "llama_index")
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
    wrong = [found for found in all_imports("ragcachekit", "ragcachekit_kernels") if found.top in OURS[2:]]
    assert not wrong, listed(wrong)


def test_llama_index_s_paths_only_name_our_classes() -> None:
    assert {found.module for found in all_imports("llama_index")} == {"llama_index_ragcachekit"}


def test_nothing_shipped_imports_what_is_not() -> None:
    wrong = [found for found in all_imports(*OURS) if found.top in NOT_SHIPPED]
    assert not wrong, listed(wrong)


def test_integrations_use_only_public_names() -> None:
    public = public_names()
    wrong = [
        found
        for found in all_imports("langchain_ragcachekit", "llama_index_ragcachekit")
        if found.module not in PLUMBING
        and (
            (found.top == "ragcachekit" and (found.module != "ragcachekit" or not set(found.names) <= public))
            or found.top == "ragcachekit_kernels"
        )
    ]
    assert not wrong, listed(wrong)


def test_integrations_do_not_import_each_other() -> None:
    for one, other in (OURS[2:], OURS[:1:-1]):
        wrong = [found for found in all_imports(one) if found.top == other]
        assert not wrong, listed(wrong)


def modules() -> dict[str, Path]:
    """Every module of the shipped packages and of the benchmarks, by its dotted name."""
    named = {}
    for package in (*packages(), ROOT / "benchmarks"):
        for file in package.rglob("*.py"):
            parts = [package.name, *file.relative_to(package).with_suffix("").parts]
            named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def import_graph(files: dict[str, Path]) -> dict[str, set[str]]:
    """Which module names which: imports in functions and for type checkers count as well."""
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        package = next(p for p in (*packages(), ROOT / "benchmarks") if file.is_relative_to(p))
        for found in imports_of(file, package):
            inner = {f"{found.module}.{part}" for part in found.names} & files.keys()
            outside = [part for part in found.names if f"{found.module}.{part}" not in inner]
            if found.module in files and (outside or not found.names):
                inner.add(found.module)
            graph[name] |= inner - {name}
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """A circle of the graph, its first member again at its end; empty where there is none."""
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        stack = [(start, iter(sorted(graph[start])))] if start not in done else []
        path += [start] if stack else []
        while stack:
            following = next(stack[-1][1], None)
            if following is None:
                done.add(stack.pop()[0])
                path.pop()
            elif following in path:
                return [*path[path.index(following) :], following]
            elif following not in done:
                path.append(following)
                stack.append((following, iter(sorted(graph[following]))))
    return []


def test_no_two_files_import_each_other() -> None:
    graph = import_graph(modules())
    for name in ("ragcachekit", "langchain_ragcachekit", "llama_index_ragcachekit"):
        graph[name] = set()  # lists public names, which are imported at their first use
    assert not circle_in(graph), " -> ".join(circle_in(graph))


@pytest.mark.parametrize(
    ("graph", "circle"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}, []),
    ],
)
def test_circles_are_found(graph, circle) -> None:
    assert circle_in(graph) == circle


def test_importing_does_not_import_torch() -> None:
    """Module after module in one process: each is said with what of it is there afterwards."""
    modules = (*OURS[:1], *OURS[2:], "ragcachekit.prompt.segments")
    program = (
        f"import importlib, sys\nfor name in {modules}:\n    module = importlib.import_module(name)\n"
        "    getattr(module, 'ChatRagCache', None)\n"
        "    print(name, *sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [*modules]


SAMPLES = [
    ("from ragcachekit.plan.planner import x", "store", {"plan"}),
    ("from ..plan import plan", "store", {"plan"}),
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
    assert ALLOWED["model"] == {*FREE, "prompt"}
    assert ALLOWED["forward"] == {*FREE, "prompt", "model", "store", "prefix_tree", "policies", "plan"}
    assert {"generate", "retrieval"} <= ALLOWED["engine"]
    assert not {"commands", PUBLIC} & ALLOWED["engine"]


def test_nothing_shipped_unpickles_or_evaluates() -> None:
    """What a cache reads from disk or network must not run code."""
    code = re.compile(
        r"\b(import (c?pickle|dill|marshal|shelve|joblib)|from (c?pickle|dill|marshal|shelve|joblib) import"
        r"|allow_pickle=True|weights_only=False|torch\.load\(|(?<![\w.])(eval|exec)\()"
    )
    wrong = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for package in packages()
        for file in sorted(package.rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if code.search(line)
    ]
    assert not wrong, "\n".join(wrong)
