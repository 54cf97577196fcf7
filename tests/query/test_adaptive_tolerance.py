"""Tolerances per region reach a target recall of results: one region tolerates rewording, one does not."""

from __future__ import annotations

import random
import threading
from statistics import fmean

import numpy as np
import pytest

from ragcachekit.query.adaptive import AdaptiveTolerance
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.retrieval import CachedRetrieval

K, DIM, MOST = 5, 16, 0.02


class Simulation:
    """Questions around two directions; documents lie in clusters near one, anywhere near the other."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.centres = np.eye(DIM)[:2] * 6
        spreads = (1.2, 0.5)
        self.bases = [
            c + self.rng.normal(0, s, (25, DIM)) for c, s in zip(self.centres, spreads, strict=True)
        ]
        clustered = np.repeat(self.bases[0], K, axis=0) + self.rng.normal(0, 0.001, (25 * K, DIM))
        anywhere = self.centres[1] + self.rng.normal(0, 0.6, (300, DIM))
        rows = np.concatenate([clustered, anywhere])
        self.rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def question(self, region: int) -> np.ndarray:
        base = self.bases[region][self.rng.integers(25)]
        return base + self.rng.normal(0, self.rng.uniform(0, 0.3), DIM)

    def search(self, asked: np.ndarray) -> list[tuple[int, str]]:
        nearest = np.argsort(-(self.rows @ asked))[:K]
        return [(int(one), str(one)) for one in nearest]


def run(
    seed: int, adaptive: AdaptiveTolerance | None, lookups: int = 4000
) -> tuple[list[float], list[float]]:
    """Recall of results of the hits, and hit rate, of each region in the second half."""
    simulation, rng = Simulation(seed), random.Random(seed)
    retrieval: CachedRetrieval[str] = CachedRetrieval(ProximityCache(5000, MOST), adaptive=adaptive)
    recalls: tuple[list[float], list[float]] = ([], [])
    asked = [0, 0]
    for turn in range(lookups):
        region = rng.randrange(2)
        question = simulation.question(region)
        found = simulation.search(question)
        answer = retrieval.get(question, "p", lambda found=found: found)
        if adaptive is not None:
            assert adaptive.flush(10)
        if turn >= lookups // 2:
            asked[region] += 1
            if answer.hit:
                fresh = {document for _, document in found}
                recalls[region].append(len(fresh & {*answer.documents}) / K)
    return [fmean(one) for one in recalls], [len(one) / n for one, n in zip(recalls, asked, strict=True)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_recall_of_results_reaches_the_target_in_both_regions(seed: int) -> None:
    target = 0.9
    fixed, fixed_rates = run(seed, None)
    assert fixed[0] > 0.95 > target > 0.7 > fixed[1], (
        "one region tolerates this tolerance, the other does not"
    )
    adaptive = AdaptiveTolerance(target, share=0.25, seed=seed)
    recalls, rates = run(seed, adaptive)
    assert min(recalls) >= target
    assert rates[0] >= 0.95 * fixed_rates[0], "hits are given up only where they are wrong"
    tolerances = [one.tolerance for one in adaptive.report()]
    assert max(tolerances) == MOST
    assert min(tolerances) < MOST / 2


def test_the_same_seed_gives_the_same_tolerances() -> None:
    reports = []
    for seed in (3, 3, 4):
        adaptive = AdaptiveTolerance(0.9, share=0.25, seed=seed)
        run(0, adaptive, 800)
        reports.append([one._replace(recall=0.0) for one in adaptive.report()])
    assert reports[0] == reports[1] != reports[2]


def test_a_share_of_the_hits_is_checked() -> None:
    adaptive, calls = AdaptiveTolerance(share=0.1, regions=1), list[int]()
    adaptive.tolerance("p", [1.0, 0.0], 0.1)
    for turn in range(1020):
        adaptive.check("p", [1.0, 0.0], [1], lambda turn=turn: calls.append(turn) or [1])
        assert adaptive.flush(10)
    assert calls[:20] == list(range(20)), "the first are all checked"
    assert 60 <= len(calls) - 20 <= 140


def test_a_tolerance_is_never_above_the_cache_s_and_rises_again() -> None:
    adaptive = AdaptiveTolerance(0.9, share=1.0)

    def checked(times: int, found: list[int]) -> float:
        for _ in range(times):
            assert adaptive.check("p", [1.0, 0.0], [1, 2], lambda: found)
            assert adaptive.flush(10)
        return adaptive.tolerance("p", [1.0, 0.0], 0.1)

    assert adaptive.tolerance("p", [1.0, 0.0], 0.1) == 0.1
    assert 0.02 < checked(1, [3, 4]) < 0.05
    assert checked(100, [2, 1]) == 0.1
    assert 0.0 < checked(100, []) < 0.0002, "what the index does not find any more counts as wrong"
    highest = max(adaptive.tolerance("p", [1.0, 0.0], 0.1) for _ in range(12_000))
    assert highest == 0.1, "without hits there are no checks, so it rises with the lookups"


def test_partitions_and_far_questions_have_tolerances_of_their_own() -> None:
    adaptive = AdaptiveTolerance(0.9)
    for place, asked in (("p", [1.0, 0.0]), ("p", [0.0, 1.0]), ("q", [1.0, 0.0])):
        adaptive.tolerance(place, asked, 0.1)
    adaptive.check("p", [1.0, 0.01], [1], lambda: [2])
    adaptive.flush(10)
    found = [
        adaptive.tolerance(*where, 0.1) for where in (("p", [1.0, 0.0]), ("p", [0.0, 1.0]), ("q", [1.0, 0.0]))
    ]
    assert found[0] < found[1] == found[2] == 0.1


def test_a_failing_check_and_bad_embeddings_change_nothing(caplog) -> None:
    def broken() -> list[int]:
        raise ConnectionError("index down")

    adaptive = AdaptiveTolerance()
    adaptive.tolerance("p", [1.0, 0.0], 0.1)
    assert adaptive.check("p", [1.0, 0.0], [1], broken)
    adaptive.flush(10)
    assert "index down" in caplog.text
    for bad in ([float("nan"), 0.0], [1.0, 0.0, 0.0], [0.0, 0.0], [1e30, 0.0]):
        assert adaptive.tolerance("p", bad, 0.1) == 0.1
    assert not adaptive.check("unknown", [1.0], [1], list)
    adaptive.close()
    assert not adaptive.check("p", [1.0, 0.0], [1], list)


@pytest.mark.parametrize(
    "settings", [{"target": 0.0}, {"target": 1.1}, {"share": float("nan")}, {"regions": 0}]
)
def test_bad_settings(settings) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        AdaptiveTolerance(**settings)


def test_threads() -> None:
    adaptive = AdaptiveTolerance(share=1.0)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            asked = [rng.random(), rng.random()]
            assert 0.0 <= adaptive.tolerance(rng.choice("pq"), asked, 0.1) <= 0.1
            adaptive.check("p", asked, [1], lambda: [1, 2])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert adaptive.flush(10)
    assert len(adaptive.report()) == 16
