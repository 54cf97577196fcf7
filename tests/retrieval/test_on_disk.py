"""A document index on disk: reopened, shared, killed, damaged."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcachekit.errors import RetrievalError
from ragcachekit.json_store import JsonStore
from ragcachekit.retrieval.documents import DocumentIndex
from ragcachekit.retrieval.index import VectorIndex

KINDS = ["faiss-flat", "faiss-hnsw"]


def rows(count: int, dim: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


def fill(index: DocumentIndex, start: int, stop: int) -> None:
    ids = list(range(start, stop))
    index.add(ids, rows(stop)[start:], [f"text {i}" for i in ids], [{"n": i} for i in ids])


def abandon(index: DocumentIndex) -> None:
    """Leave the files as a killed process does: without saving."""


def vector_files(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("index-*"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", [abandon, DocumentIndex.close])
def test_what_was_acknowledged_is_there_again(tmp_path: Path, kind: str, end: Any) -> None:
    query = rows(1, seed=9)[0]
    for start in (0, 30, 60):
        index = DocumentIndex(kind, "cosine", tmp_path)
        assert len(index) == start
        fill(index, start, start + 20)
        fill(index, start + 20, start + 30)
        index.add([start], rows(1, seed=start + 1), ["new"], replace=True)
        hits = index.search(query, 12)
        end(index)
    with DocumentIndex(kind, "cosine", tmp_path) as again:
        assert again.version == 9
        assert again.search(query, 12) == hits
        assert [record.text for record in again.get([0, 1, 60])] == ["new", "text 1", "new"]


def keys_of(path: Path) -> list[str]:
    with JsonStore(path / "documents") as store:
        return [key for key in sorted(store.keys()) if not key.startswith("doc:")]


def test_the_log_is_bounded_and_the_file_follows(tmp_path: Path) -> None:
    index = DocumentIndex("faiss-flat", "l2", tmp_path)
    fill(index, 0, 900)
    assert vector_files(tmp_path) == []
    fill(index, 900, 1001)
    assert vector_files(tmp_path) == ["index-2"]
    fill(index, 1001, 20_000)
    assert vector_files(tmp_path) == ["index-3"]
    fill(index, 20_000, 21_500)
    assert keys_of(tmp_path) == ["head", "log:4"]
    assert vector_files(tmp_path) == ["index-3"]
    index.delete(range(1_000))
    assert (keys_of(tmp_path), vector_files(tmp_path)) == (["head"], ["index-5"])
    with DocumentIndex("faiss-flat", "l2", tmp_path) as again:
        assert len(again) == 20_500
        assert again.search(rows(21_500)[21_400], 1)[0].record.id == 21_400


CHILD = """
import sys
import numpy as np
from ragcachekit.retrieval.documents import DocumentIndex

index = DocumentIndex("faiss-flat", "l2", sys.argv[1])
rows = np.random.default_rng(0).standard_normal((200_000, 8)).astype(np.float32)
at = index.version * 400
print("opened", at, flush=True)
while True:
    ids = list(range(at, at + 400))
    index.add(ids, rows[at : at + 400], [str(i) for i in ids])
    at += 400
    print(at, flush=True)
"""


def child(path: Path, code: str = CHILD) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kills", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_killed_process_loses_nothing_acknowledged(tmp_path: Path, kills: int) -> None:
    """Killed at a random time, at times while it saves the vectors' file (each 1,000 documents)."""
    generator = np.random.default_rng(7)
    for _ in range(kills):
        with child(tmp_path) as process:
            assert process.stdout is not None
            acknowledged = int(process.stdout.readline().split()[1])
            for _ in range(generator.integers(1, 5)):
                acknowledged = int(process.stdout.readline())
            time.sleep(generator.random() / 20)
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().split("\n")
            acknowledged = max([acknowledged, *(int(line) for line in rest[:-1])])
        index = DocumentIndex("faiss-flat", "l2", tmp_path)
        assert len(index) in (acknowledged, acknowledged + 400)
        assert len(index.get(range(len(index)))) == len(index)
        for one in generator.integers(0, len(index), 20).tolist():
            hit = index.search(rows(200_000)[one], 1)[0]
            assert (hit.record.id, hit.record.text, hit.score) == (one, str(one), 0.0)
        abandon(index)


@pytest.mark.parametrize("count", [50, 5_000])
def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with DocumentIndex("faiss-flat", "l2", tmp_path) as index:
        fill(index, 0, 10)
        with monkeypatch.context() as patch:
            patch.setattr(VectorIndex, "save", full)
            patch.setattr(JsonStore, "put", full)
            with pytest.raises(OSError, match="No space left"):
                fill(index, 10, 10 + count)
        assert (len(index), index.version) == (10, 1)
        assert len(index.search(rows(1)[0], 99)) == 10
        fill(index, 10, 10 + count)
        assert len(index) == 10 + count


@pytest.mark.parametrize("damage", ["flip", "missing"])
def test_damaged_vectors_are_said(tmp_path: Path, damage: str) -> None:
    with DocumentIndex("faiss-flat", "l2", tmp_path) as index:
        fill(index, 0, 50)
    (file,) = tmp_path.glob("index-*")
    if damage == "flip":
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    else:
        file.unlink()
    with pytest.raises(RetrievalError, match="Add the documents again under another path"):
        DocumentIndex("faiss-flat", "l2", tmp_path)


def test_a_damaged_document_is_left_out(tmp_path: Path) -> None:
    with DocumentIndex("faiss-flat", "l2", tmp_path) as index:
        fill(index, 0, 30)
        nearest = [hit.record.id for hit in index.search(rows(1)[0], 5)]
        with JsonStore(tmp_path / "documents") as store:
            store.delete([f"doc:{nearest[1]}"])
        found = [hit.record.id for hit in index.search(rows(1)[0], 4)]
        assert found == [nearest[0], *nearest[2:]]
        index.add([nearest[1]], rows(30)[[nearest[1]]], ["again"], replace=True)
        assert [hit.record.id for hit in index.search(rows(1)[0], 5)] == nearest


def test_two_indexes_on_one_path_see_each_other(tmp_path: Path) -> None:
    with (
        DocumentIndex("faiss-flat", "l2", tmp_path) as one,
        DocumentIndex("faiss-flat", "l2", tmp_path) as two,
    ):
        fill(one, 0, 10)
        assert len(two) == 10
        one.delete([3])
        one.add([4], rows(1) + 9, ["moved"], replace=True)
        assert [hit.record.text for hit in two.search(rows(1)[0] + 9, 1)] == ["moved"]
        fill(two, 10, 12)
        assert 11 in one
        fill(one, 12, 3_000)  # saves: the log goes
        fill(one, 3_000, 3_001)
        assert two.version == 6
        assert two.search(rows(3_001)[3_000], 1)[0].record.id == 3_000
        assert len(two) == len(one) == 3_000
        stages = two.search_stages(rows(1)[0], 3)
        next(stages)
        fill(one, 4_000, 4_001)
        assert [*stages] == [two.search(rows(1)[0], 3)]


def test_an_index_that_cannot_be_read_for_a_moment_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DocumentIndex("faiss-flat", "l2", tmp_path) as index:
        fill(index, 0, 30)
        with monkeypatch.context() as patch:
            patch.setattr(JsonStore, "get", lambda *_: None)
            for call in (lambda: index.search(rows(1)[0], 1), lambda: fill(index, 30, 40)):
                with pytest.raises(RetrievalError, match="cannot be read"):
                    call()
            with pytest.raises(RetrievalError, match="cannot be read"):
                DocumentIndex("faiss-flat", "l2", tmp_path)
        assert len(index.get(index.ids)) == 30


def test_lost_documents_are_no_empty_index(tmp_path: Path) -> None:
    with DocumentIndex("faiss-flat", "l2", tmp_path) as index:
        fill(index, 0, 30)
    (tmp_path / "documents" / "cache.db").write_bytes(b"no database" * 1000)
    for _ in range(2):
        with pytest.raises(RetrievalError, match="cannot be read; add them again under another path"):
            DocumentIndex("faiss-flat", "l2", tmp_path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"index": "faiss-flat"}, "was made with index='faiss-hnsw', not 'faiss-flat'"),
        ({"metric": "cosine"}, "metric='l2', not 'cosine'"),
        ({"embedder": "other"}, "embedder='mini', not 'other'"),
        ({"links": 9}, "links=32, not 9"),
    ],
)
def test_another_index_is_refused(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    made = {"index": "faiss-hnsw", "metric": "l2", "embedder": "mini"}
    with DocumentIndex(path=tmp_path, **made) as index:  # type: ignore[arg-type]
        fill(index, 0, 3)
    with pytest.raises(ValueError, match=match):
        DocumentIndex(path=tmp_path, **{**made, **options})
    with DocumentIndex("faiss-hnsw", "l2", tmp_path) as again:
        assert len(again) == 3


WRITER = """
import sys
import numpy as np
from ragcachekit.retrieval.documents import DocumentIndex

base = int(sys.argv[1].rpartition("#")[2])
rows = np.random.default_rng(0).standard_normal((4_000, 8)).astype(np.float32)
with DocumentIndex("faiss-hnsw", "l2", sys.argv[1].rpartition("#")[0]) as index:
    for at in range(base, base + 500, 25):
        ids = list(range(at, at + 25))
        index.add(ids, rows[ids], [f"{i}" for i in ids])
        index.delete(ids[:5])
        index.add(ids[5:10], rows[ids[5:10]] + 100, [f"{i} moved" for i in ids[5:10]], replace=True)
"""


def test_processes_write_and_read_at_once(tmp_path: Path) -> None:
    writers = [child(Path(f"{tmp_path}#{base}"), WRITER) for base in (0, 1_000, 2_000)]
    vectors, failures = rows(4_000), []
    with DocumentIndex("faiss-hnsw", "l2", tmp_path) as index:

        def read() -> None:
            while any(writer.poll() is None for writer in writers):
                for query in rows(20, seed=5):
                    for record, score in index.search(query, 5):
                        moved = 100 * record.text.endswith("moved")
                        true = np.linalg.norm(vectors[int(record.id)] + moved - query.astype(np.float64))
                        if abs(true - score) > 1e-3:
                            failures.append((record, score, true))

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [writer.wait() for writer in writers] == [0, 0, 0]
        assert failures == []
        expected = {i for i in range(3_000) if i % 1_000 < 500 and i % 25 >= 5}
        assert set(index.ids) == expected
        assert index.version == 3 * 20 * 3
        assert sum(r.text.endswith("moved") for r in index.get(index.ids)) == 3 * 20 * 5
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()
