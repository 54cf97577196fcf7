"""The notebooks run on the real sample model, from the first cell to the last, in the soak."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from ragcachekit.model.loading import sample_model

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = "ragcachekit-tests"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Execute notebooks one after the other in one kernel of this interpreter, which forgets names between.

    Returns the outputs of the code cells by notebook, as text.
    """
    spec = tmp_path / "kernels" / KERNEL
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": KERNEL}))
    known, cache = (
        sample_model().parents[1],
        tmp_path / "cache" / "ragcachekit",
    )  # tune records its choice there
    shutil.copytree(known, cache, ignore=lambda *_: {"models", "auto", "calibrations"})
    (cache / "models").symlink_to(known / "models")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    paths = [ROOT, ROOT / "kernels", ROOT / "integrations"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def outputs(*names: str) -> list[list[str]]:
        whole = nbformat.v4.new_notebook()
        for name in names:
            cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
            code = [cell for cell in cells if cell.cell_type == "code"]
            whole.cells += [*code, nbformat.v4.new_code_cell("%reset -f")]
        for number, cell in enumerate(whole.cells):
            cell.id = f"cell-{number}"
        NotebookClient(whole, timeout=120, kernel_name=KERNEL).execute(cwd=str(tmp_path))
        found: list[list[str]] = [[]]
        for cell in whole.cells:
            if cell.source == "%reset -f":
                found.append([])
            else:
                found[-1].append(json.dumps(cell.outputs))
        return found[:-1]

    return outputs


pytestmark = pytest.mark.filterwarnings("default")  # of the notebook client's own event loop


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_shows_what_it_printed_when_it_ran(path) -> None:
    text = path.read_text()
    assert len(text) < 100_000
    assert not re.search(r"(/home|/root|/tmp|/Users)/", text), "a path of the machine"
    book = nbformat.read(path, as_version=4)
    kinds = [kind for cell in book.cells for one in cell.get("outputs", []) for kind in one.get("data", {})]
    assert len(kinds) >= 4
    assert "text/html" in kinds
    assert ("image/png" in kinds) == (path.stem != "debug_no_reuse")
    assert not [one for cell in book.cells for one in cell.get("outputs", []) if one.output_type == "error"]


@pytest.mark.soak
@pytest.mark.parametrize("names", [["debug_no_reuse"], ["tour", "choose_for_your_data"]], ids=" ".join)
def test_they_run(run, names) -> None:
    for name, shown in zip(names, run(*names), strict=True):
        SHOWS[name](shown)


def shows_reuse(shown: list[str]) -> None:
    assert "LlamaForCausalLM on cpu" in shown[0]
    assert "1874" in shown[2]
    assert "first token after" in shown[3]
    for how in ("exact", "approximate", "recomputed", "computed"):
        assert re.search(rf'background-color: #\w+\\*"> {how} [1-9]', shown[4]), how
    assert "image/png" in shown[5]
    read = [int(tokens) for tokens in re.findall(r"'cache_read': (\d+)", shown[6])]
    assert len(read) == 2
    assert read[1] > 100
    assert "image/png" in shown[7]


def shows_a_choice(shown: list[str]) -> None:
    assert shown[1].count("% ") == 11
    assert "prefill ms" in shown[1]
    assert "image/png" in shown[2]
    assert "auto -> " in shown[3]
    assert re.search(r"tolerance 0\.\d+ \(cosine\)", shown[4])


def shows_the_faults(shown: list[str]) -> None:
    assert "occurs verbatim in the prompt" in shown[1]
    assert shown[2].count("printed as Python") >= 2
    for why in ("HTML-escaped", "whitespace", "not registered"):
        assert why in shown[3], why
    assert "host]" not in shown[4]
    assert shown[5].count(": found") == 3
    assert "[3 host]" in shown[6]


SHOWS = {"tour": shows_reuse, "choose_for_your_data": shows_a_choice, "debug_no_reuse": shows_the_faults}
