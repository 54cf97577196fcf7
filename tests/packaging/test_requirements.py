"""``make`` installs what ``requirements/`` names and resolves nothing: it must be all, and nothing else."""

import os
import re
import shutil
from importlib import metadata
from pathlib import Path

import pytest
from compile_requirements import EXTRAS, ROOT, compiled, wanted
from packaging.utils import canonicalize_name


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_file_is_what_make_requirements_writes(extra: str) -> None:
    assert (ROOT / "requirements" / f"{extra}.txt").read_text() == compiled(extra), "run `make requirements`"


def test_the_demo_needs_no_gpu_and_no_tests() -> None:
    demo, dev = (
        set((ROOT / "requirements" / f"{extra}.txt").read_text().split("\n")[1:]) for extra in EXTRAS
    )
    assert demo < dev
    assert [one for one in demo if re.match(r"triton|nvidia|cuda|pytest|ray", one)] == []
    assert [one for one in dev if one.startswith("triton==")] != []
    assert f"torch=={metadata.version('torch').partition('+')[0]}" in demo


def test_clients_have_what_they_need_beside_the_tests_own() -> None:
    pins: list[dict[str, str]] = []
    for name in ("dev", "clients"):
        lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()[1:]
        assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
        pins.append({canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines})
    dev, clients = pins
    assert {name: pin for name, pin in clients.items() if dev.get(name) == pin} == {}, "needed twice"
    folder, all_pins = os.environ.get("CLIENTS") or str(ROOT / ".venv/clients"), {**dev, **clients}
    for package in metadata.distributions(path=[folder]):
        assert clients[canonicalize_name(package.name)] == package.version, "run `make soak`"
        for needed in wanted(package.requires or ()):
            pin = all_pins.get(canonicalize_name(needed.name), "0")
            unused = needed.marker or needed.name == "boto3"  # of litellm, for one cloud
            assert unused or needed.specifier.contains(pin, True), (package.name, str(needed))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("pyproject.toml", '"tqdm>=4.66",', '"tqdm>=4.66", "types-tqdm",', None),
        ("pyproject.toml", '"tqdm>=4.66",', '"tqdm>=4.66", "rich-cli",', "rich-cli is required"),
        ("pyproject.toml", '"numpy>=1.26",', '"numpy>=99",', "numpy>=99 is required"),
        ("constraints.txt", "filelock==", "filelock==99", "is installed"),
        ("constraints.txt", "sympy==", "# sympy==", "sympy>=.* is required"),
    ],
)
def test_a_change_is_noticed(file: str, old: str, new: str, message: str | None, tmp_path: Path) -> None:
    for one in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / one, tmp_path)
    text = (tmp_path / file).read_text()
    assert text.count(old) == 1
    (tmp_path / file).write_text(text.replace(old, new))
    if message is None:
        added = set(compiled("demo", tmp_path).splitlines()) - set(compiled("demo").splitlines())
        assert [one.partition("==")[0] for one in added] == ["types-tqdm"]
    else:
        with pytest.raises(ValueError, match=message):
            compiled("demo", tmp_path)
