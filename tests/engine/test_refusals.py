"""What a refusal leaves behind: nothing."""

from __future__ import annotations

import pytest
import torch
from families import build

from ragcachekit import ModelNotSupported, RagCache
from ragcachekit.errors import ModelChanged
from ragcachekit.link import admission


def test_a_refused_model_keeps_the_attention_it_had(monkeypatch, tmp_path):
    model = build("llama")
    before = model.config._attn_implementation
    monkeypatch.setattr(admission, "tolerance_for", lambda dtype: 0.0)
    with pytest.raises(ModelNotSupported, match="layer 0"):
        RagCache(model, cache_dir=tmp_path)
    assert model.config._attn_implementation == before


def test_encode_refuses_a_model_that_changed(tmp_path):
    model = build("llama")
    with RagCache(model, cache_dir=tmp_path) as rag:
        with torch.no_grad():
            next(model.parameters()).add_(1)
        with pytest.raises(ModelChanged, match="make a new RagCache"):
            rag.encode(["a chunk of text"])
