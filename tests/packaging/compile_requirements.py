"""Writes ``requirements/``: exact versions of all that an extra needs, so that nothing is resolved later.

What needs what is read from ``pyproject.toml`` and from the packages in this environment, and versions from
``constraints.txt``. The files are for Linux on x86-64 and for every Python that the project names.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
EXTRAS = ("demo", "dev")
LINUX = {
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
}
PYTHONS = ("3.11", "3.12", "3.13")
CUDA = re.compile(r"nvidia-|cuda-|triton$")  # what torch's builds for GPUs bring along


def compiled(extra: str, root: Path = ROOT) -> str:
    """The file of an extra of ``root``; ValueError for a pin that is missing or not what is required."""
    parsed = tomllib.loads((root / "pyproject.toml").read_text())
    project, pins = parsed["project"], {}
    for line in (root / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pins[canonicalize_name(line.partition("==")[0])] = line
    extras = project["optional-dependencies"]
    waiting = list(wanted([*parsed["build-system"]["requires"], *project["dependencies"], *extras[extra]]))
    seen, names = set(), set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        if name == project["name"]:
            waiting += wanted([needed for own in requirement.extras for needed in extras[own]])
        elif name not in pins or not requirement.specifier.contains(pins[name].partition("==")[2], True):
            raise ValueError(f"{requirement} is required, constraints.txt has {pins.get(name)}")
        else:
            names.add(name)
            waiting += needs(requirement, pins[name])
    pinned = "".join(f"{pins[name]}\n" for name in sorted(names))
    return f"# Made by `make requirements`: all that the extra `{extra}` needs\n{pinned}"


def needs(requirement: Requirement, pin: str) -> Iterator[Requirement]:
    """What a package and its required extras need; nothing where only another Python needs the package."""
    if requirement.marker:
        return
    package = metadata.distribution(requirement.name)
    if Version(package.version).public != pin.partition("==")[2]:
        raise ValueError(f"{pin} is wanted, and {package.version} is installed")
    for needed in wanted(package.requires or (), requirement.extras):
        if not (package.name == "torch" and CUDA.match(needed.name)):
            yield needed


def wanted(texts: Iterable[str], extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """Requirements that hold for one of ``PYTHONS``; those that do not hold here keep their markers."""
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        environments = [{**LINUX, "extra": extra} for extra in extras or ("",)]
        if marker and any(map(marker.evaluate, environments)):
            requirement.marker = None
        others = [
            {**one, "python_version": python, "python_full_version": f"{python}.0"}
            for one in environments
            for python in PYTHONS
        ]
        if not requirement.marker or any(map(requirement.marker.evaluate, others)):
            yield requirement


if __name__ == "__main__":
    for extra in EXTRAS:
        (ROOT / "requirements" / f"{extra}.txt").write_text(compiled(extra))
