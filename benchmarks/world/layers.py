"""Deviation of the chunks' KV from a full prefill, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from ragcachekit.commands.bench.fidelity.engines import FULL
from ragcachekit.commands.bench.fidelity.rows import DEVIATIONS, Results, Row, mean_row
from ragcachekit.commands.bench.report import table
from ragcachekit.commands.bench.resample import Bootstrap

LAYER = "layer"


def layer_rows(results: Results, seed: int) -> list[Row]:
    """One row per way and layer: how far the chunks' keys and values are from those of ``full``."""
    bootstrap = Bootstrap(len(results[FULL]), seed)
    out: list[Row] = []
    for way, found in results.items():
        for layer in range(len(found[0].key_deviation)) if way != FULL else ():
            row: Row = {"part": LAYER, "policy": way.policy, "encoder": way.encoder, "layer": layer}
            for name in DEVIATIONS:
                row |= mean_row(name, np.array([getattr(one, name)[layer] for one in found]), bootstrap)
            out.append({**row, "n": len(found)})
    return out


def layer_table(rows: Sequence[Row]) -> Table:
    """One line per policy and encoder, one column per layer: keys / values."""
    lines: dict[tuple[str, str], Row] = {}
    for row in rows:
        way = (row["policy"], row["encoder"])
        line = lines.setdefault(way, {"policy": way[0], "encoder": way[1]})
        line[f"layer {row['layer']}"] = f"{row['key_deviation']:.2g} / {row['value_deviation']:.2g}"
    return table("Deviation of chunk keys / values from full, relative", list(lines.values()))
