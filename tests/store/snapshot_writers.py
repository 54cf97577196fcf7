"""Forks processes that write a hybrid's snapshots and are killed; run by test_snapshots.py, says JSON.

A process of its own: it forks after everything is imported, and opens no engine itself, for its threads.
Arguments: the folder of the store, the number of kills, and of writers at a time.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from ragcachekit import RagCache, StoreConfig
from ragcachekit.store.disk_folder import entry_files
from snapshots_kit import Dialogues, bare, model_of, rag_of

HOST, DISK = 60_000, 600_000
"""Bytes; a snapshot takes some 20,000."""


def engine(folder: Path) -> RagCache:
    return rag_of("qwen3_5", store=StoreConfig(host_bytes=HOST, disk_path=folder, disk_bytes=DISK))


def talks_of(seed: int) -> Dialogues:
    """The same texts and chunks each time, drawn in another order."""
    talks = Dialogues(0)
    talks.draw.seed(seed)
    return talks


def write_forever(folder: Path, seed: int, said: int) -> None:
    talks = talks_of(seed)
    while True:
        with engine(folder) as rag:
            os.write(said, b"o")
            for _ in range(talks.draw.randrange(4, 12)):
                rag.generate(talks.any(), max_new_tokens=1)


def survey(folder: Path, seed: int, said: int) -> None:
    """Open the folder as the next process would, and ask."""
    counts, tree, talks = Counter[str](), folder / "tree", talks_of(seed)
    counts["temp files"] += len(list(tree.glob("*.tmp")))
    with engine(folder) as rag:
        left = {one.name for one in tree.iterdir() if one.is_file()} - {"lock"}
        counts["orphans"] += len(left - entry_files(tree).keys())
        for _ in range(3):
            prompt = talks.any()
            answer = rag.generate(prompt, max_new_tokens=4, do_sample=False)
            counts["asked"] += 1
            counts["wrong"] += answer.token_ids != bare("qwen3_5", prompt, 4)
            counts["from disk"] += any(use.source == "tree:disk" for use in answer.report.link.uses)
        rag.flush()
        counts["damaged"] += sum(tier.damaged for tier in rag.stats())
        counts["over budget"] += sum(tier.nbytes > tier.budget for tier in rag.stats())
    os.write(said, json.dumps(counts).encode())


def forked(work, *args) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            work(*args, write_end)
        finally:
            os._exit(0)
    os.close(write_end)
    return pid, read_end


def main(folder: Path, kills: int, writers: int) -> None:
    torch.set_num_threads(1)  # a forked child has no copies of torch's worker threads
    model_of("qwen3_5")
    draw, totals = random.Random(kills), Counter[str]()
    for start in range(0, kills, writers):
        group = [forked(write_forever, folder, start + n) for n in range(min(writers, kills - start))]
        for _, said in group:
            os.read(said, 1)  # an engine is open, if it could be
        time.sleep(draw.uniform(0.0, 0.6))
        for pid, said in group:
            os.kill(pid, signal.SIGKILL)
            totals["kills"] += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
            os.close(said)
        pid, said = forked(survey, folder, 1_000_000 + start)
        with open(said, "rb") as pipe:
            counts = pipe.read()
        os.waitpid(pid, 0)
        totals += Counter(json.loads(counts)) if counts else Counter({"surveys that failed": 1})
    sys.stdout.write(json.dumps(totals))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]))
