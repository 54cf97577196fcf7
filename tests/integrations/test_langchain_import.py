"""Importing the integration: no torch, and what to install where a package is missing."""

import subprocess
import sys

import pytest

HIDDEN = """
import importlib.abc, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
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


def test_it_is_imported_without_torch_and_transformers():
    result = run("import langchain_ragcachekit as l; print(l.ChatRagCache.__name__)", "torch", "transformers")
    assert result.stdout == "ChatRagCache\n", result.stderr


@pytest.mark.parametrize(
    ("code", "hidden", "message"),
    [
        ("import langchain_ragcachekit", "langchain_core", "pip install 'ragcachekit[langchain]'"),
        (
            "from langchain_core.embeddings import FakeEmbeddings as F\n"
            "from langchain_ragcachekit import RagCacheVectorStore as V\n"
            "V.from_texts(['a text'], F(size=3)).similarity_search('a')",
            "faiss",
            "ragcachekit[faiss]",
        ),
    ],
)
def test_a_missing_extra_is_named(code, hidden, message):
    result = run(code, hidden)
    assert result.returncode == 1
    assert message in result.stderr.splitlines()[-1]
