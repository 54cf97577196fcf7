"""Importing the integrations: what to install where a package is missing."""

import subprocess
import sys

import pytest

HIDDEN = """
import importlib.abc, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if {hidden!r}[0] in (name, name.partition(".")[0], ".".join(name.split(".")[:2])):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def run(code, *hidden):
    return subprocess.run(
        [sys.executable, "-c", HIDDEN.format(hidden=hidden) + code],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("code", "hidden", "message"),
    [
        ("import langchain_ragcachekit", "langchain_core", "pip install langchain-core"),
        ("import llama_index_ragcachekit", "llama_index", "pip install 'llama-index-core>=0.14,<0.15'"),
        ("import llama_index.llms.ragcachekit", "llama_index.core", "pip install 'llama-index-core"),
        (
            "from langchain_core.embeddings import FakeEmbeddings as F\n"
            "from langchain_ragcachekit import RagCacheVectorStore as V\n"
            "V.from_texts(['a text'], F(size=3)).similarity_search('a')",
            "faiss",
            "pip install faiss-cpu (the extra 'faiss')",
        ),
    ],
)
def test_a_missing_extra_is_named(code, hidden, message):
    result = run(code, hidden)
    assert result.returncode == 1
    assert message in result.stderr.splitlines()[-1]
