"""What `make soak` runs beside `make test`, and the figures of long runs."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def soaked(values: Iterable[Any], *always: Any) -> list[Any]:
    """Parameters of a test, tuples for several; `make test` runs those of ``always`` alone."""
    given = [one if isinstance(one, tuple) else (one,) for one in values]
    kept = [one if isinstance(one, tuple) else (one,) for one in always]
    return [pytest.param(*one, marks=() if one in kept else pytest.mark.soak) for one in given]


def figures(test: str, **counts: object) -> None:
    """Print figures as a line of JSON, and keep them in the folder of RAGCACHEKIT_SOAK_FIGURES, if any."""
    line = json.dumps({"test": test, **counts})
    sys.stdout.write(line + "\n")
    folder = os.environ.get("RAGCACHEKIT_SOAK_FIGURES")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / "figures.jsonl").open("a") as file:
            file.write(line + "\n")
