"""Models from a folder or a hub's cache."""

from types import SimpleNamespace

import pytest
import transformers

from families import build, greedy, plain, tokens
from ragcachekit import RagCache
from ragcachekit.model.identity import default_cache_dir
from ragcachekit.model.loading import load_model
from speaking import byte_level, speaker


def test_from_pretrained_is_the_saved_model(tmp_path):
    folder = tmp_path / "model"
    model = speaker()
    model.save_pretrained(folder)
    byte_level().save_pretrained(folder)
    with RagCache.from_pretrained(folder, cache_dir=tmp_path / "cache", device="cpu", cold="never") as rag:
        answer = rag.generate("Where is Berlin?", max_new_tokens=5, do_sample=False)
        ids = rag.link("Where is Berlin?").input_ids[0].tolist()
        assert not rag.model.training
    assert answer.token_ids == greedy(model, ids, 5)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_a_path_that_is_no_folder_is_not_looked_up_elsewhere(name):
    with pytest.raises(FileNotFoundError, match="no model folder at"):
        RagCache.from_pretrained(name)


def test_a_wrapped_model_saves_as_it_was(tmp_path):
    model = build("llama")
    RagCache(model, cache_dir=tmp_path / "cache")
    model.save_pretrained(tmp_path / "saved")
    assert "ragcachekit" not in (tmp_path / "saved" / "config.json").read_text()
    again = type(model).from_pretrained(tmp_path / "saved").eval()
    assert greedy(again, tokens(20), 4) == greedy(plain("llama"), tokens(20), 4)


def test_where_things_lie(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "ragcachekit"


def test_the_tokenizer_is_of_the_same_source(monkeypatch, tmp_path):
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
    (tmp_path / "models--someone--small").mkdir()
    source = {"revision": "v1", "cache_dir": tmp_path, "token": "secret", "trust_remote_code": True}
    load_model("someone/small", "cpu", dtype="float32", **source)
    assert given == {"tokenizer": source, "model": {"dtype": "float32", **source}}


def test_a_name_without_a_hub_is_an_error_at_once(monkeypatch, tmp_path):
    """Instead of five retries, which take most of a minute."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OSError, match=r"someone/small is neither .* and 127\.0\.0\.1:9 cannot be reached"):
        load_model("someone/small", "cpu", cache_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a folder nor a hub id"):
        load_model("some one", "cpu")
    with pytest.raises(OSError, match=r"someone/small is neither .* the hub may not be asked"):
        load_model("someone/small", "cpu", cache_dir=tmp_path, local_files_only=True)
