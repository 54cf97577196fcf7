"""The query cache's tolerance, calibrated on questions that the demo does not ask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from ragcachekit.query.calibrate import Calibration, calibrate

MAX_FALSE_HITS = 0.1
"""Share of wordings whose nearest other question may lie within the tolerance; all have a close sibling."""


def calibrated(pairs: Sequence[tuple[str, str]], embeddings: Embeddings) -> Calibration:
    """The largest tolerance under the bound :data:`MAX_FALSE_HITS`, for the cosine distance.

    ``pairs`` are two wordings of a question each. The different pairs are, for each wording, the nearest
    wording of another question, as a cache that holds all of them would find it.
    """
    one, two = (
        np.asarray(embeddings.embed_documents([*side]), np.float32) for side in zip(*pairs, strict=True)
    )
    nearest = [_nearest_other(side, (one, two)) for side in (one, two)]
    return calibrate(
        (one, two),
        (np.concatenate([one, two]), np.concatenate(nearest)),
        metric="cosine",
        max_false_hit_rate=MAX_FALSE_HITS,
    )


def _nearest_other(rows: NDArray[np.float32], wordings: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """For row i the nearest of all wordings of questions other than i."""
    everything = np.concatenate(wordings)
    near = _unit(rows) @ _unit(everything).T
    own = np.tile(np.arange(len(rows)), len(wordings))
    near[own[None] == np.arange(len(rows))[:, None]] = -np.inf
    found: NDArray[np.float32] = everything[near.argmax(axis=1)]
    return found


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    unit: NDArray[np.float32] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit
