"""Reports of measurements: rows in one JSON frame, tables for the terminal, bootstrap intervals."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from rich.table import Table

SCHEMA = 1
RESAMPLES = 2000
_WHOLE = 24  # characters of a word that a table keeps together however narrow the terminal is


@dataclass(frozen=True)
class BenchReport:
    """Rows of one bench, flat and of plain values; ``model`` also names random weights."""

    bench: str
    model: str
    seed: int
    rows: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "bench": self.bench,
            "machine": machine(),
            "versions": versions(),
            "model": self.model,
            "seed": self.seed,
            "rows": list(self.rows),
        }

    def write_json(self, path: str | os.PathLike[str]) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def part(self, name: str) -> BenchReport:
        """The report with the rows of one part only, without the column ``part``."""
        rows = [{key: row[key] for key in row if key != "part"} for row in self.rows if row["part"] == name]
        return replace(self, rows=tuple(rows))

    def table(self, title: str, columns: Sequence[str] | None = None) -> Table:
        """A rich table of the rows; ``columns`` to choose and order."""
        return table(title, self.rows, columns)


def table(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> Table:
    """Rows as a rich table, numbers right-aligned and short."""
    names = list(columns) if columns is not None else list(rows[0]) if rows else []
    out = Table(title=title, title_justify="left")
    for name in names:
        numeric = bool(rows) and all(isinstance(row.get(name), int | float | None) for row in rows)
        heading = name.replace("_", "\n")  # rich would cut words before it breaks all
        words = " ".join([heading, *(_cell(row.get(name)) for row in rows)]).split()
        width = min(max(map(len, words)), _WHOLE)
        out.add_column(heading, justify="right" if numeric else "left", min_width=width, overflow="fold")
    for row in rows:
        out.add_row(*(_cell(row.get(name)) for name in names))
    return out


def machine() -> dict[str, Any]:
    """Processor, cores, memory and accelerator of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = None
    if hasattr(os, "sysconf"):  # not on Windows
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {
        "processor": named[0] if named else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": memory,
        "system": f"{platform.system()} {platform.machine()}",
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that figures depend on."""
    out = {"python": platform.python_version()}
    for name in ("ragcachekit", "torch", "transformers", "numpy", "triton", "faiss-cpu", "langchain-core"):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


class Bootstrap:
    """Draws of ``n`` units with replacement, the same for every figure, so that figures are paired.

    ``counts`` ``[resamples, n]`` is how often each unit was drawn: a product with it resamples any figure.
    """

    def __init__(self, n: int, seed: int = 0) -> None:
        picks = np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))
        self.counts = np.stack([np.bincount(pick, minlength=n) for pick in picks]).astype(np.float64)

    def quantile_of_mean(self, values: ArrayLike, level: float) -> float:
        """One-sided bound of the mean of ``values`` ``[n]``: the percentile ``level`` (0 to 1)."""
        column = np.asarray(values, np.float64)
        return float(np.quantile(self.counts @ column / len(column), level))

    def of_mean(self, values: ArrayLike) -> tuple[float, float]:
        """95 % percentile interval of the mean of ``values`` ``[n]``."""
        return self.quantile_of_mean(values, 0.025), self.quantile_of_mean(values, 0.975)
