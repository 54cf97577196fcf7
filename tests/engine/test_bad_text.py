"""Text that is none: lone surrogates, as undecodable bytes of a document leave them."""

from pathlib import Path

import pytest

from ragcachekit import Chunk, Prompt, RagCache, StoreConfig, Text
from ragcachekit.types import chunk_id
from speaking import byte_level, sentencepiece, speaker

BAD = "Berlin is the capital \udcff of Germany, where the river Spree flows."
GOOD = "Paris is the capital of France; the river Seine flows in Paris."


def rag_at(path: Path, tokenizer) -> RagCache:
    store = StoreConfig(disk_path=path / "kv")
    return RagCache(speaker(), tokenizer, cold="now", policy="reuse", store=store, cache_dir=path / "cache")


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["bytes", "sentencepiece"])
def test_a_damaged_document_does_not_take_the_answer_down(tmp_path: Path, tokenizer) -> None:
    with rag_at(tmp_path, tokenizer) as rag:
        assert rag.register([BAD, GOOD]) == 2
        prompt = f"Context:\n{BAD}\n\n{GOOD}\nWhere does the river \ud800 flow?"
        first = rag.generate(prompt, max_new_tokens=2)
        again = rag.generate(prompt, max_new_tokens=2)
        assert len(again.report.link.chunks) == len(first.report.link.chunks) >= 2
        assert again.report.link.reused_tokens > 0
        parts = Prompt([Text("Context:\n"), Chunk(BAD), Text("\nWhere?")])
        assert rag.generate(parts, max_new_tokens=2).text is not None
        messages = [{"role": "user", "content": prompt}]
        assert rag.generate(messages, max_new_tokens=2).text is not None
        (name,) = rag.encode([BAD])
        rag.prefetch([BAD])
        assert "".join(rag.stream(prompt, max_new_tokens=2)) is not None
        assert rag.forget(texts=[BAD]) >= 1
        assert rag.forget([name]) == 0


@pytest.mark.parametrize("call", ["register", "encode", "generate", "forget", "new"])
def test_a_namespace_that_is_no_text_is_refused_at_once(tmp_path: Path, call: str) -> None:
    with rag_at(tmp_path, byte_level()) as rag:
        calls = {
            "register": lambda: rag.register([GOOD], namespace="acme\ud800"),
            "encode": lambda: rag.encode([GOOD], namespace="acme\ud800"),
            "generate": lambda: rag.generate(GOOD, namespace="acme\ud800"),
            "forget": lambda: rag.forget(namespace="acme\ud800"),
            "new": lambda: RagCache(speaker(), namespace="acme\ud800", cache_dir=tmp_path / "cache"),
        }
        with pytest.raises(ValueError, match="surrogates not allowed"):
            calls[call]()


def test_ids_of_two_namespaces_never_meet() -> None:
    assert chunk_id((65, 7), "a") != chunk_id((7,), "a\0A" + "\0" * 6)
    shifted = [("", (97, 65)), ("a\0\0\0\0\0\0\0", (65,)), ("a\0\0\0\0\0\0\0A\0\0\0\0\0\0\0", ())]
    assert len({chunk_id(ids, salt) for salt, ids in shifted}) == 3
