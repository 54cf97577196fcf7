"""The notebooks run on the real sample model, from the first cell to the last."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from ragcachekit.commands.sample_model import sample_model

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = "ragcachekit-tests"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Execute a notebook with this interpreter; returns the outputs of its code cells as text."""
    spec = tmp_path / "kernels" / KERNEL
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": KERNEL}))
    paths = [ROOT, ROOT / "kernels", ROOT / "integrations"]
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    known, cache = (
        sample_model().parents[1],
        tmp_path / "cache" / "ragcachekit",
    )  # tune records its choice there
    shutil.copytree(known, cache, ignore=lambda *_: {"models", "auto", "calibrations"})
    (cache / "models").symlink_to(known / "models")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))

    def outputs(name: str) -> list[str]:
        notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
        NotebookClient(notebook, timeout=120, kernel_name=KERNEL).execute(cwd=str(tmp_path))
        return [json.dumps(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]

    return outputs


pytestmark = pytest.mark.filterwarnings("default")  # of the notebook client's own event loop


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_kept_without_outputs(path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_tour(run) -> None:
    shown = run("tour.ipynb")
    assert "LlamaForCausalLM on cpu" in shown[0]
    assert "1874" in shown[2]
    assert "first token after" in shown[3]
    for how in ("exact", "approximate", "recomputed", "computed"):
        assert re.search(rf"background:#\w+;color:#\w+'> {how} [1-9]", shown[4]), how
    assert "image/png" in shown[5]
    read = [int(tokens) for tokens in re.findall(r"'cache_read': (\d+)", shown[6])]
    assert len(read) == 2
    assert read[1] > 100
    assert "image/png" in shown[7]


def test_choose_for_your_data(run) -> None:
    shown = run("choose_for_your_data.ipynb")
    assert shown[1].count("<tr><td") == 6
    assert ">policy</th>" in shown[1]
    assert "image/png" in shown[2]
    assert "auto -> " in shown[3]
    assert re.search(r"tolerance 0\.\d+ \(cosine\)", shown[4])


def test_debug_no_reuse(run) -> None:
    shown = run("debug_no_reuse.ipynb")
    assert "stands verbatim in the prompt" in shown[1]
    assert shown[2].count("printed as Python") >= 2
    for why in ("HTML-escaped", "whitespace", "not registered"):
        assert why in shown[3], why
    assert "host]" not in shown[4]
    assert shown[5].count(">found</td>") == 3
    assert "[3 host]" in shown[6]
