"""A hybrid's snapshots on a disk: writers are killed, files damaged. The bare model's tokens, or a miss."""

import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest
from snapshot_writers import talks_of

from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.disk_folder import entry_files
from snapshots_kit import bare, rag_of
from soak_kit import figures

SCRIPT = Path(__file__).with_name("snapshot_writers.py")
BAD = ("wrong", "lost", "unforgotten", "orphans", "damaged", "over budget", "surveys that failed")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this test forks")
@pytest.mark.parametrize(
    ("kills", "writers"),
    [
        pytest.param(2, 2, marks=pytest.mark.soak),
        pytest.param(250, 1, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
        pytest.param(250, 2, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_killed_writers_leave_whole_snapshots(tmp_path, said_by, kills, writers):
    totals = json.loads(said_by(SCRIPT, tmp_path / "kv", kills, writers))
    figures("kills of writers of snapshots", writers=writers, **totals)
    assert totals["kills"] == kills
    assert {name: totals.get(name, 0) for name in BAD} == dict.fromkeys(BAD, 0)
    assert kills < 100 or totals["from disk"] > kills / 10 < totals["acknowledged"]


def flipped(draw, data):
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


DAMAGES = {
    "flipped bit": lambda draw, data, other: flipped(draw, data),
    "truncated": lambda draw, data, other: data[: draw.randrange(len(data))],
    "swapped": lambda draw, data, other: other,
    "longer": lambda draw, data, other: data + draw.randbytes(draw.randrange(1, 64)),
    "zeroed": lambda draw, data, other: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
}


@pytest.mark.parametrize(
    "damages", [5, pytest.param(2_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_damaged_snapshots_are_misses_and_are_written_again(tmp_path, damages):
    """The tree has no memory: every beginning comes from the files."""
    draw, counts, talks = random.Random(damages), Counter(), talks_of(0)
    prompts = [talks.prompt(*chunks, question=40) for chunks in ((0, 1), (2,), (3, 0))]
    right = [bare("qwen3_5", prompt, 3) for prompt in prompts]

    def opened():
        tree = KnowledgeTree(disk=DiskStore(tmp_path, 600_000))
        return tree, rag_of("qwen3_5", tree=tree)

    def ask(rag):
        answers = [rag.generate(prompt, max_new_tokens=3, do_sample=False) for prompt in prompts]
        assert rag.flush(60)
        counts["wrong"] += [answer.token_ids for answer in answers] != right
        return [answer.report.link.exact_tokens for answer in answers]

    tree, rag = opened()
    ask(rag)
    whole = ask(rag)
    assert min(whole) > 30
    for number in range(damages):
        kind = list(DAMAGES)[number % len(DAMAGES)]
        file, other = (tmp_path / name for name in draw.sample(sorted(entry_files(tmp_path)), 2))
        data = file.read_bytes()
        file.write_bytes(DAMAGES[kind](draw, data, other.read_bytes()))
        if draw.random() < 0.1:  # a fresh process sees it first
            rag.close()
            tree.close()
            tree, rag = opened()
        found = ask(rag)
        counts[kind] += 1
        counts["not a miss"] += found == whole
        counts["made up"] += any(now > then for now, then in zip(found, whole, strict=True))
        counts["not written again"] += ask(rag) != whole
    rag.close()
    tree.close()
    figures("damaged snapshots", damages=damages, **counts)
    assert {n: counts[n] for n in ("wrong", "not a miss", "made up", "not written again")} == {
        **{"wrong": 0, "not a miss": 0, "made up": 0, "not written again": 0}
    }
