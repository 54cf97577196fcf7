"""Figures of long runs, one line of JSON each: printed (``pytest -s``), and kept where an environment
variable says so, for those who copy them into the documentation."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def figures(test: str, **counts: object) -> None:
    line = json.dumps({"test": test, **counts})
    sys.stdout.write(line + "\n")
    folder = os.environ.get("RAGCACHEKIT_SOAK_FIGURES")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / "figures.jsonl").open("a") as file:
            file.write(line + "\n")
