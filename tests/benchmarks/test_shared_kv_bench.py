"""The bench of requests over the same chunks, on a tiny model. Never how fast."""

import json

from benchmarks.world.reader_folder import READER

SIZES = "--chunks 2 --chunk-tokens 40 --requests 1,4 --limit 3 --max-new-tokens 9 --runs 1 --policy lego:4"


def test_sharing_holds_fewer_bytes_and_takes_more_requests_into_the_same_memory(proofs, tmp_path):
    (tmp_path / "a.md").write_text("a town is in the town. " * 60)
    given = ("--model", READER, "--corpus", tmp_path, "--json", tmp_path / "s.json")
    result = proofs("shared-kv", *given, *SIZES.split())
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    held = {(row["requests"], row["way"]): row["kv_mb"] for row in rows if row["limit_mb"] is None}
    assert held[1, "own"] == held[1, "shared"]
    assert held[4, "own"] > 1.5 * held[4, "shared"]
    together = {row["way"]: row["together"] for row in rows if row["limit_mb"] is not None}
    assert together == {"own": 3, "shared": 4}
