"""Chunks of which a prompt has only part, as a boundary changed their first or last tokens."""

import functools

import pytest
import torch
from transformers import DynamicCache

from engine_kit import FOLDER, stored_in
from families import greedy
from ragcachekit import RagCache, StoreConfig, TreeConfig
from ragcachekit.types import chunk_id
from speaking import speaker
from tokenizer_kit import paragraphs, tokenizer_of

ONE, TWO, THREE = (f"{text[:300].rsplit(' ', 1)[0]}." for text in paragraphs(300)[4:7])
ASKED = {"max_new_tokens": 8, "do_sample": False}
QUESTION = "\n\nQuestion: What is it?"
SPACED = f"Context: {ONE} {TWO} {THREE}{QUESTION}"
ENCODERS = ("standalone", "system", "average:2")


@functools.cache
def model():
    return speaker(3, vocab_size=2600, max_position_embeddings=2048)


def engine(kind, **options):
    own = {"policy": "reuse", "encoder": "standalone", "cold": "never", "cache_dir": FOLDER.name}
    return RagCache(model(), tokenizer_of(kind), **{**own, **options})


def bare(kind, text):
    return greedy(model(), tokenizer_of(kind)(text).input_ids, 8)


@torch.no_grad()
def alone(ids, start):
    """A chunk's keys and values run at its positions, without the library."""
    cache = DynamicCache()
    where = torch.arange(start, start + len(ids))[None]
    model()(torch.tensor([ids]), position_ids=where, past_key_values=cache, use_cache=True)
    return cache.layers


@pytest.mark.parametrize(
    ("kind", "tier"), [("gpt2", "host"), ("llama3", "host"), ("llama2", "host"), ("llama3", "disk")]
)
def test_rows_of_the_whole_chunk_serve_the_part_at_its_positions(kind, tier, tmp_path):
    """Oracle: the chunk's own tokens run alone, at the positions that the part's tokens have."""
    store = StoreConfig(disk_path=tmp_path) if tier == "disk" else StoreConfig()
    with engine(kind, store=store) as rag:
        ids = rag.encode([ONE, TWO, THREE])
        rag.flush()
    with engine(kind, store=store) if tier == "disk" else engine(kind) as rag:
        assert rag.encode([ONE, TWO, THREE]) == ids
        linked = rag.link(SPACED)
        layers, report = linked.cache.layers, linked.report
        assert [use.chunk_id for use in report.chunks] == ids
        assert all(use.source != "computed" for use in report.chunks)
        segments = rag.components.parser.parse(SPACED, rag.namespace).segments
        assert sum(bool(segment.own) for segment in segments) >= 2
        start = 0
        for segment in segments:
            count, first = len(segment.token_ids), segment.first
            if segment.is_chunk:
                own = segment.own or segment.token_ids
                right = alone(own, start - first)
                for ours, theirs in zip(layers, right, strict=True):
                    at = slice(start, start + count)
                    for side in ("keys", "values"):
                        found = getattr(ours, side)[0, :, at]
                        wanted = getattr(theirs, side)[0, :, first : first + count]
                        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            start += count


@pytest.mark.parametrize(
    ("encoder", "policy"),
    [*((encoder, "lego:100000") for encoder in ENCODERS), ("system", "prefix"), ("standalone", "full")],
)
def test_everything_recomputed_is_the_bare_model(encoder, policy):
    with engine("llama3", encoder=encoder, cold="now", tree=TreeConfig(host_bytes=1 << 26)) as rag:
        rag.encode([ONE, TWO, THREE], prompt=SPACED)
        for _ in range(3):
            assert rag.generate(SPACED, policy=policy, **ASKED).token_ids == bare("llama3", SPACED)


@pytest.mark.parametrize(
    ("encoder", "how"), [*((encoder, "ids") for encoder in ENCODERS), ("average:2", "texts")]
)
def test_forget_takes_parts_too(encoder, how):
    with engine("llama3", encoder=encoder, cold="now", tree=TreeConfig(host_bytes=1 << 26)) as rag:
        rag.register([ONE, TWO, THREE])
        for _ in range(3):
            rag.generate(SPACED, **ASKED)
        rag.flush()
        gone = chunk_id(rag.components.parser.chunk_ids(TWO), rag.namespace)
        assert rag.forget([gone] if how == "ids" else None, texts=None if how == "ids" else [TWO]) > 0
        for key in stored_in(rag):
            assert not any(name.startswith(gone) for name in (key.chunk_id, *key.context))
        again = rag.generate(SPACED, **ASKED).report.link
        assert {use.source for use in again.chunks if use.chunk_id == gone} <= {"computed"}


def test_forget_finds_a_text_inside_a_part():
    """Rows that a prompt computed of a part hold the text as well."""
    with engine("llama3", encoder="in-prompt", policy="craft:1.0", cold="now") as rag:
        rag.register([ONE, TWO, THREE])
        rag.generate(SPACED, **ASKED)
        rag.flush()
        assert any(":" in key.chunk_id for key in stored_in(rag))
        words = " ".join(TWO.split()[3:9])
        assert rag.forget(texts=[words]) > 0
        behind = (TWO, THREE)  # the text, and what was computed after it
        gone = {chunk_id(rag.components.parser.chunk_ids(text), rag.namespace) for text in behind}
        assert not any(key.chunk_id[:64] in gone for key in stored_in(rag))
