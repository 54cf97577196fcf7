"""The store bench at sizes that mean nothing: every row, and that it refuses wrong answers."""

import json

import pytest

from benchmarks import store as bench
from ragcachekit.errors import RagCacheError
from ragcachekit.store.disk import DiskStore


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench, "_ROUND_BYTES", 400_000)


def test_the_command_writes_every_operation_at_every_size(proofs, tmp_path):
    folder, out = tmp_path / "bench", tmp_path / "out.json"
    folder.mkdir()
    result = proofs("store", "--sizes", "0.1,0.2", "--rounds", "2", "--folder", folder, "--json", out)
    assert result.exit_code == 0, result.output
    assert list(folder.iterdir()) == []
    rows = json.loads(out.read_text())["rows"]
    assert {row["operation"] for row in rows} == {bench.READ_WARM, bench.READ_COLD, bench.WRITE}
    assert sorted({row["size_mb"] for row in rows}) == pytest.approx([0.1, 0.2], rel=0.2)
    for row in rows:
        assert 0 < row["share_min"] <= row["share"] <= row["share_max"]
        assert min(row["gb_per_s"], row["raw_gb_per_s"]) > 0
        assert row["rounds"] == 2
    assert proofs("store", "--sizes", "0").exit_code == 2


def test_no_figure_beside_a_wrong_answer(tmp_path, monkeypatch):
    real = DiskStore.get
    monkeypatch.setattr(DiskStore, "get", lambda self, key: real(self, key) if key.chunk_id == "0" else None)
    with pytest.raises(RagCacheError, match="gone"):
        bench.run([0.1], 1, tmp_path)
