"""Executes the notebooks with the sample model and keeps what they show; `make notebooks` runs it."""

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from ragcachekit.model.loading import sample_model

ROOT = Path(__file__).parents[2]
NAMES = ("tour", "choose_for_your_data", "debug_no_reuse")
"""The second one keeps a choice of `auto`, which the first one must not find."""
SHOWN = ("image/png", "text/html", "text/plain")
"""Of one output the richest is kept: what renders without the notebook's kernel."""


def shown(output: Any) -> Any | None:
    """An output as it is kept; None for progress bars and logs."""
    if output.output_type == "stream":
        return output if output.name == "stdout" else None
    data = output.get("data", {})
    if "application/vnd.jupyter.widget-view+json" in data:
        return None
    kept = [kind for kind in SHOWN if kind in data]
    plain = {"text/plain": data["text/plain"]} if "text/plain" in data else {}
    return nbformat.v4.new_output(output.output_type, {kept[0]: data[kept[0]], **plain}) if kept else None


def execute(path: Path) -> None:
    """Run a notebook from the first cell to the last, and write it with its outputs."""
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=300).execute(cwd=str(path.parent))
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs if (kept := shown(output)) is not None]
    book.metadata.language_info = {"name": "python"}
    text = nbformat.writes(book) + "\n"
    path.write_text(re.sub(re.escape(str(Path.home())), "~", text))


if __name__ == "__main__":
    os.environ["PYTHONWARNINGS"] = "ignore"
    with tempfile.TemporaryDirectory() as folder:
        (cache := Path(folder) / "ragcachekit").mkdir()
        (cache / "models").symlink_to(sample_model().parent)
        os.environ["XDG_CACHE_HOME"] = folder
        for name in NAMES:
            execute(ROOT / "notebooks" / f"{name}.ipynb")
