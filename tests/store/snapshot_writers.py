"""Forks processes that write a hybrid's snapshots and are killed; run by test_snapshots.py, says JSON.

A process of its own: it forks after everything is imported, and opens no engine itself, for its threads.
Arguments: the folder of the tree, the number of kills, and of writers at a time.

Prompts of the namespace ``churn`` are evicted within a quota. Those of ``kept`` are not: once a writer has
closed its engine, it says which it asked, and they must be there until a survey forgets them.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import permutations
from pathlib import Path

import torch

from ragcachekit import Prompt, RagCache
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.disk_folder import entry_files, group_of, hashed
from snapshots_kit import Dialogues, bare, model_of, rag_of

HOST, CHURN, DISK = 60_000, 600_000, 3_000_000
"""Bytes; a snapshot takes some 20,000, and all of ``KEPT`` have room beside ``churn``."""

KEPT = [(system, *pair) for system in range(2) for pair in permutations(range(4), 2)]


@contextmanager
def engine(folder: Path) -> Iterator[RagCache]:
    tree = KnowledgeTree(host_bytes=HOST, disk=DiskStore(folder, DISK, quotas={"churn": CHURN}))
    with closing(tree), rag_of("qwen3_5", tree=tree, namespace="churn") as rag:
        yield rag


def kept(number: int) -> Prompt:
    system, *chunks = KEPT[number]
    return Dialogues(0).prompt(*chunks, system=system)


def talks_of(seed: int) -> Dialogues:
    """The same texts and chunks each time, drawn in another order."""
    talks = Dialogues(0)
    talks.draw.seed(seed)
    return talks


def write_forever(folder: Path, seed: int, said: int) -> None:
    """Says a byte for each engine that is open, after those of the kept prompts that the last one stored."""
    talks, asked = talks_of(seed), list[int]()
    while True:
        with engine(folder) as rag:
            os.write(said, bytes([*asked, len(KEPT)]))
            asked = []
            for _ in range(talks.draw.randrange(1, 9)):
                if talks.draw.random() < 0.3:
                    asked.append(talks.draw.randrange(len(KEPT)))
                    rag.generate(kept(asked[-1]), namespace="kept", max_new_tokens=1)
                else:
                    rag.generate(talks.any(), max_new_tokens=1)


def survey(folder: Path, seed: int, stored: list[int], forgets: bool, said: int) -> None:
    """Open the folder as the next process would, and ask."""
    counts, talks = Counter[str](), talks_of(seed)
    counts["temp files"] += len(list(folder.glob("*.tmp")))
    with engine(folder) as rag:
        left = {one.name for one in folder.iterdir() if one.is_file()} - {"lock"}
        files = entry_files(folder)
        counts["orphans"] += len(left - files.keys())
        churn = sum(size for name, size in files.items() if group_of(name) == hashed("churn"))
        counts["over budget"] += churn > CHURN

        def ask(prompt: Prompt, namespace: str) -> int:
            answer = rag.generate(prompt, namespace=namespace, max_new_tokens=4, do_sample=False)
            counts["asked"] += 1
            counts["wrong"] += answer.token_ids != bare("qwen3_5", prompt, 4)
            counts["from disk"] += any(use.source == "tree:disk" for use in answer.report.link.uses)
            return answer.report.link.exact_tokens

        for _ in range(3):
            ask(talks.any(), "churn")
        for number in stored[-1:] + talks.draw.sample(stored, min(2, len(stored))):
            length = sum(len(segment.token_ids or ()) for segment in kept(number).segments[:-1])
            counts["acknowledged"] += 1
            counts["lost"] += ask(kept(number), "kept") < length
            if forgets:
                rag.forget(namespace="kept")
                counts["unforgotten"] += ask(kept(number), "kept") > 0
                break
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
    draw, totals, stored = random.Random(kills), Counter[str](), list[int]()
    for start in range(0, kills, writers):
        group = [forked(write_forever, folder, start + n) for n in range(min(writers, kills - start))]
        heard = [os.read(said, 1) for _, said in group]  # an engine is open, if it could be
        assert all(heard), "a writer ended by itself"
        time.sleep(draw.uniform(0.0, 0.6))
        for pid, said in group:
            os.kill(pid, signal.SIGKILL)
            totals["kills"] += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
            with open(said, "rb") as pipe:
                stored += [number for number in pipe.read() if number < len(KEPT)]
        forgets = bool(stored) and draw.random() < 0.2
        pid, said = forked(survey, folder, 1_000_000 + start, stored, forgets)
        with open(said, "rb") as pipe:
            counts = pipe.read()
        os.waitpid(pid, 0)
        totals += Counter(json.loads(counts)) if counts else Counter({"surveys that failed": 1})
        stored = [] if forgets else stored
    sys.stdout.write(json.dumps(totals))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]))
