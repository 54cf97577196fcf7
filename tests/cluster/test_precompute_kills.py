"""Actors and drivers that are killed while a corpus is encoded: whole, the same bytes, little done twice."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest
import ray

from cluster_kit import actors, batches, begun, corpus, job, stored
from ragcachekit.cluster.precompute import BATCH, EncodingActor, encode_chunks, table
from ragcachekit.store.entry import read_key

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500), pytest.mark.filterwarnings("default")]

CHUNKS = 2000
KILLS = 10
DRIVER = """
import sys
from pathlib import Path
import ray
from cluster_kit import corpus, job
from ragcachekit.cluster.precompute import encode_chunks
folder = Path(sys.argv[1])
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
encode_chunks(job(folder, folder / "notes", 0.3), corpus(400), actors=2)
ray.shutdown()
"""


@contextmanager
def local_ray():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def undisturbed(folder, chunks):
    """Entries of one actor in this process that nothing disturbs."""
    folder.mkdir()
    actor = EncodingActor(job(folder, folder / "notes"))
    for start in range(0, len(chunks), BATCH):
        actor(table(chunks[start : start + BATCH]))
    return stored(folder)


def done_again(notes, chunks):
    """Batches that were begun more than once, each time counted."""
    counts = Counter(batches(notes))
    slices = [
        tuple(one for one, _ in chunks[start : start + BATCH]) for start in range(0, len(chunks), BATCH)
    ]
    return sum(counts[ids] - 1 for ids in slices)


class Killer(threading.Thread):
    """Kills actors at random moments, ``KILLS`` times."""

    def __init__(self, notes):
        super().__init__(daemon=True)
        self._notes, self._draw = notes, random.Random(7)
        self.kills, self.done = 0, threading.Event()

    def run(self):
        while self.kills < KILLS and not self.done.wait(self._draw.uniform(0.5, 8)):
            if alive := actors(self._notes):
                os.kill(self._draw.choice(alive), signal.SIGKILL)
                self.kills += 1


def test_ten_killed_actors_lose_nothing(tmp_path):
    chunks, notes = corpus(CHUNKS), tmp_path / "notes"
    assert len({one for one, _ in chunks}) == CHUNKS
    killer = Killer(notes)
    with local_ray():
        killer.start()
        begin = time.perf_counter()
        encoded = encode_chunks(job(tmp_path, notes, 0.8), chunks, actors=2)
        seconds = time.perf_counter() - begin
        killer.done.set()
        killer.join()
    assert killer.kills == KILLS
    assert encoded == CHUNKS
    counts = begun(notes)
    assert {one for one, _ in chunks} <= counts.keys()
    repeated = done_again(notes, chunks)
    sys.stdout.write(f"{KILLS} kills: {repeated} batches of {BATCH} done again, {seconds:.0f} s\n")
    assert repeated <= KILLS
    assert stored(tmp_path) == undisturbed(tmp_path / "undisturbed", chunks)


def test_a_run_whose_driver_was_killed_goes_on(tmp_path):
    chunks, notes = corpus(400), tmp_path / "notes"
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], start_new_session=True)
    limit = time.monotonic() + 300
    while not notes.exists() or len(batches(notes)) < 12:
        assert driver.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.2)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    while actors(notes):
        assert time.monotonic() < limit
        time.sleep(0.2)
    before = {read_key(path).chunk_id for path in (tmp_path / "kv").glob("*.safetensors")}
    assert 0 < len(before) < 400
    with local_ray():
        encode_chunks(job(tmp_path, notes), chunks, actors=2, stored=before)
    repeated = done_again(notes, chunks)
    sys.stdout.write(f"killed with {len(before)} stored: {repeated} batches done again\n")
    assert stored(tmp_path) == undisturbed(tmp_path / "undisturbed", chunks)
