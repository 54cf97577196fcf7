"""Model, tokenizer and digests come from the same revision."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import transformers

from ragcachekit.model.weights import load_model, weights_folder


@pytest.fixture
def hub(tmp_path):
    """A hub's cache folder with two revisions of one model."""
    repo = tmp_path / "models--someone--small"
    (repo / "refs").mkdir(parents=True)
    for name, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        (repo / "refs" / name).write_text(commit)
        (repo / "snapshots" / commit / "part").mkdir(parents=True)
        for folder in (repo / "snapshots" / commit, repo / "snapshots" / commit / "part"):
            (folder / "config.json").write_text("{}")
    return tmp_path


def test_the_folder_is_that_of_the_revision(hub):
    snapshots = hub / "models--someone--small" / "snapshots"
    asked = {"cache_dir": hub, "dtype": "auto"}
    assert weights_folder("someone/small", **asked) == snapshots / ("a" * 40)
    assert weights_folder("someone/small", revision="v1", **asked) == snapshots / ("b" * 40)
    assert weights_folder("someone/small", revision="b" * 40, **asked) == snapshots / ("b" * 40)
    part = weights_folder("someone/small", revision="v1", subfolder="part", **asked)
    assert part == snapshots / ("b" * 40) / "part"
    assert weights_folder("someone/small", revision="v2", **asked) is None
    assert weights_folder(hub, subfolder="x") == hub / "x"


def test_the_tokenizer_is_of_the_same_source(monkeypatch):
    given = {}

    class Model(SimpleNamespace):
        def eval(self):
            return self

        def to(self, device):
            return self

    def loader(kind, result):
        def load(name, **options):
            given[kind] = options
            return result

        return load

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", loader("tokenizer", "tokens"))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", loader("model", Model()))
    source = {"revision": "v1", "cache_dir": "there", "token": "secret", "trust_remote_code": True}
    load_model("someone/small", "cpu", dtype="float32", **source)
    assert given == {"tokenizer": source, "model": {"dtype": "float32", **source}}
