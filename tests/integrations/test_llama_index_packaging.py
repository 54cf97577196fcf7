"""The classes as LlamaIndex's ecosystem expects them: base classes, import paths, the llamahub table."""

import importlib
import tomllib
from pathlib import Path

import llama_index_ragcachekit as ours

SETTINGS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())


def test_llama_index_stays_a_namespace_that_others_share():
    for name in ("llms.ragcachekit", "core", "vector_stores.faiss"):
        importlib.import_module(f"llama_index.{name}")
    for name in ("llama_index", "llama_index.vector_stores"):
        assert importlib.import_module(name).__file__ is None
    package = Path(ours.__file__).parent.parent / "llama_index"
    assert {file.parent.name for file in package.rglob("*.py")} == {"ragcachekit"}


def test_the_llamahub_table_names_what_can_be_imported():
    table = SETTINGS["tool"]["llamahub"]
    module = importlib.import_module(table["import_path"])
    assert set(table["class_authors"]) == set(module.__all__)
    assert "integrations/llama_index" in SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
