"""bench store at sizes that mean nothing: every row, its arithmetic, and that it refuses wrong answers."""

from __future__ import annotations

import json

import pytest

from benchmarks.store import run as store_bench
from ragcachekit.errors import RagCacheError


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_bench, "_ROUND_BYTES", 400_000)
        made = store_bench.run(sizes_mb=[0.1, 0.2], rounds=2, entries=40, requests=5, folder=folder)
    assert list(folder.iterdir()) == []
    return made


def part(report, name):
    return [row for row in report.rows if row["part"] == name]


def test_throughput_has_every_operation_at_every_size(report):
    rows = part(report, store_bench.THROUGHPUT)
    operations = {row["operation"] for row in rows}
    assert operations == {store_bench.READ_WARM, store_bench.READ_COLD, store_bench.WRITE}
    assert sorted({row["size_mb"] for row in rows}) == pytest.approx([0.1, 0.2], rel=0.2)
    for row in rows:
        assert 0 < row["share_min"] <= row["share"] <= row["share_max"]
        assert min(row["gb_per_s"], row["raw_gb_per_s"]) > 0
        assert row["rounds"] == 2


def test_bookkeeping_finds_what_it_says(report):
    rows = {row["requests_of"]: row for row in part(report, store_bench.BOOKKEEPING)}
    assert {name: row["hit_rate"] for name, row in rows.items() if "hit_rate" in row} == {
        "all in host memory": 1.0,
        "all on disk": 1.0,
        "3 % of chunks take 60 %": 1.0,
        "none anywhere": 0.0,
    }
    assert [name for name in rows if name.startswith("tree")] == [
        "tree, all known",
        "tree, all new, evicting as many",
    ]
    assert all(0 < row["us_per_request"] <= row["us_max"] for row in rows.values())


def test_plot_is_drawn(report, tmp_path):
    store_bench.plot(report, tmp_path / "store.png")
    assert (tmp_path / "store.png").read_bytes().startswith(b"\x89PNG")


def test_no_figure_beside_a_wrong_answer(tmp_path, monkeypatch):
    real = store_bench.DiskStore.get
    monkeypatch.setattr(
        store_bench.DiskStore, "get", lambda self, key: real(self, key) if key.chunk_id == "0" else None
    )
    monkeypatch.setattr(store_bench, "_ROUND_BYTES", 400_000)
    with pytest.raises(RagCacheError, match="gone"):
        store_bench.run(sizes_mb=[0.1], rounds=1, entries=0, folder=tmp_path)


def test_the_command_writes_the_frame(proofs, tmp_path, monkeypatch):
    monkeypatch.setattr(store_bench, "_ROUND_BYTES", 200_000)
    out = tmp_path / "out.json"
    options = ("--sizes", "0.1", "--rounds", "1", "--entries", "20", "--requests", "2", "--folder", tmp_path)
    result = proofs("store", *options, "--json", out)
    assert result.exit_code == 0, result.output
    frame = json.loads(out.read_text())
    assert frame["bench"] == "store"
    assert {row["part"] for row in frame["rows"]} == {"throughput", "bookkeeping"}
    assert proofs("store", "--sizes", "0").exit_code == 2
