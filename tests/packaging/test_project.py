"""What is published: metadata, files of the wheel, and types that a client project sees."""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import ragcachekit

ROOT = Path(__file__).parents[2]
CLIENT = Path(__file__).parent / "client"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_semantic_and_the_same_everywhere(project: dict[str, Any]) -> None:
    version = project["project"]["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[\w.]+)?", version)
    assert ragcachekit.__version__ == version


def test_the_changelog_is_kept(project: dict[str, Any]) -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", one) for one in headings[1:])
    assert project["project"]["version"] in text
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_pythons_are_named(project: dict[str, Any]) -> None:
    named = {c.rpartition(":: ")[2] for c in project["project"]["classifiers"] if ":: Python :: 3." in c}
    assert named == {"3.11", "3.12", "3.13"}
    assert project["project"]["requires-python"] == ">=3.11"


def test_messages_install_packages_of_the_extra_that_they_name(project: dict[str, Any]) -> None:
    """Our own name is on no index: ``pip install 'ragcachekit[redis]'`` would fail."""
    shipped = [ROOT / "ragcachekit", ROOT / "integrations", ROOT / "kernels", ROOT / "docs"]
    texts = [path.read_text() for room in shipped for path in (*room.rglob("*.py"), *room.rglob("*.md"))]
    assert [text for text in texts if re.search(r"install '?ragcachekit", text)] == []
    calls = [
        [argument.value for argument in node.args if isinstance(argument, ast.Constant)][-2:]
        for text in texts
        if "missing_extra(" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("missing_extra", "load_library")
    ]
    named = [(arguments[0], shlex.split(arguments[1])) for arguments in calls if len(arguments) == 2]
    known = {"redis", "fsspec", "s3", "sample", "langchain", "llama-index", "serve", "ray"}
    assert known | {"prometheus", "opentelemetry"} <= {name for name, _ in named}
    extras = project["project"]["optional-dependencies"]
    for extra, packages in named:
        required = set(extras[extra])
        for one in extras[extra]:
            if own := re.fullmatch(r"ragcachekit\[(.*)\]", one):
                required |= {package for name in own[1].split(",") for package in extras[name]}
        names = {re.split(r"[<>=;]", one)[0] for one in required}
        assert set(packages) <= names | required, extra


def test_every_package_of_the_wheel_is_typed(project: dict[str, Any]) -> None:
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {"ragcachekit", "kernels/ragcachekit_kernels"} <= set(packages)
    assert [one for one in packages if not any((ROOT / one).rglob("*.py"))] == []
    for one in ("ragcachekit", "kernels/ragcachekit_kernels", "integrations/langchain_ragcachekit"):
        assert (ROOT / one / "py.typed").is_file()


@pytest.mark.soak
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_client_project_passes(checker: str, tmp_path: Path) -> None:
    """Both strict, over the packages as a client sees them."""
    folders = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "integrations")]
    if checker == "mypy":
        command = ["mypy", "--strict", "--cache-dir", str(tmp_path), "--follow-imports", "silent"]
        environment = {**os.environ, "MYPYPATH": os.pathsep.join(folders)}
        command += ["--config-file", os.devnull, "--explicit-package-bases", str(CLIENT / "client.py")]
    else:
        settings = tmp_path / "pyrightconfig.json"
        paths = ", ".join(f'"{folder}"' for folder in folders)
        settings.write_text(
            f'{{"include": ["{CLIENT}"], "extraPaths": [{paths}], "typeCheckingMode": "strict", '
            f'"pythonVersion": "3.11", "reportMissingTypeStubs": false}}'
        )
        command = ["pyright", "--project", str(settings), "--pythonpath", sys.executable]
        environment = {**os.environ}
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("full", ["", "1"], ids=["dependencies of this environment", "all downloaded"])
def test_the_wheel_runs_the_programs(full: str) -> None:
    environment = {**os.environ, "BIN": str(Path(sys.executable).parent), "FULL": full}
    script = str(Path(__file__).parent / "package.sh")
    done = subprocess.run(["sh", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert len(re.findall(r"prompt tokens reused", done.stdout)) == 5
