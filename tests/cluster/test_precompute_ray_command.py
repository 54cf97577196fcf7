"""``ragcachekit precompute --ray``: what it says and stores, here and in a shared tier."""

import re

import pytest
import ray

from benchmarks.world.reader_folder import READER

KEY = "TEST_SHARED_KEY"


@pytest.fixture
def precompute(command, corpus, tmp_path, monkeypatch):
    class NoEmbedding:
        def embed(self, texts, *, progress=False):
            import numpy as np

            return np.eye(len(texts), 384, dtype=np.float32)

    monkeypatch.setattr("ragcachekit.commands.embedding.MiniLM", NoEmbedding)
    monkeypatch.setenv(KEY, "a key for tests, nothing more")

    def run(*arguments):
        return command(
            *("precompute", "--corpus", corpus, "--model", READER, "--cache", tmp_path / "cache"),
            *("--chunk-tokens", "34", *arguments),
        )

    return run


def counted(result):
    """(new, kept)"""
    found = re.search(r"(\d+) new, (\d+) kept", result.stdout)
    assert found, result.output
    return tuple(map(int, found.groups()))


def test_a_shared_tier_is_written_and_found_again(precompute, tmp_path):
    url = f"file://{tmp_path}/shared"
    assert counted(precompute("--shared", url, "--shared-key", KEY, "--dry-run"))[1] == 0
    new, kept = counted(precompute("--shared", url, "--shared-key", KEY))
    assert (new > 10, kept) == (True, 0)
    assert len(list((tmp_path / "shared").rglob("*.kv"))) == new
    assert not (tmp_path / "cache" / "kv").exists()
    assert counted(precompute("--shared", url, "--shared-key", KEY)) == (0, new)
    assert counted(precompute()) == (new, 0)  # in the cache folder


def test_a_missing_key_says_how_to_make_one(precompute, tmp_path):
    result = precompute("--shared", f"file://{tmp_path}/shared", "--shared-key", "NOT_SET")
    assert result.exit_code == 2
    assert "openssl rand -hex 32" in result.output


@pytest.mark.parametrize("encoder", ["average:3", "in-prompt"])
def test_encoders_that_need_the_whole_corpus_are_refused(precompute, encoder):
    result = precompute("--ray", "--encoder", encoder)
    assert result.exit_code == 2
    assert f"--ray cannot encode by {encoder}" in result.output


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("encoder", ["system", "similar:1"])
def test_ray_stores_what_one_process_stores(precompute, encoder, tmp_path):
    alone, shared = (
        ("--shared", f"file://{tmp_path}/{name}", "--shared-key", KEY) for name in ("one", "ray")
    )
    new, _ = counted(precompute(*alone, "--encoder", encoder))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        assert counted(precompute(*shared, "--encoder", encoder, "--ray")) == (new, 0)
        assert counted(precompute(*shared, "--encoder", encoder, "--ray")) == (0, new)
        files = sorted((tmp_path / "ray").rglob("*.kv"))
        gone = files[:3] if len(files) == new else files  # neighbours' own entries are not counted
        for entry in gone:
            entry.unlink()
        again = min(len(gone), new)
        assert counted(precompute(*shared, "--encoder", encoder, "--ray")) == (again, new - again)
    finally:
        ray.shutdown()
    names = [{path.name for path in (tmp_path / name).rglob("*.kv")} for name in ("one", "ray")]
    assert names[0] == names[1]
