"""What a review found by running things: each of these was wrong once."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from families import tokens
from ragcachekit import Chunk, Prompt, RagCache, Text, agenerate
from ragcachekit.generate.options import Detokenizer
from ragcachekit.prompt.tokenizer import PromptTokenizer
from speaking import byte_level, speaker

ASKED = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": -1}
COLD = Prompt([Text(token_ids=tokens(5, 1)), Chunk(token_ids=tokens(30, 2)), Text(token_ids=tokens(6, 3))])


@pytest.fixture
def make(tmp_path):
    made = []

    def new(**options):
        made.append(RagCache(speaker(), byte_level(), cache_dir=tmp_path, policy="lego:4", **options))
        return made[-1]

    yield new
    for rag in made:
        rag.close()


@pytest.mark.parametrize("stop", ["", [""], ["x", ""]])
def test_an_empty_stop_string_is_refused(make, stop):
    rag = make(cold="never")
    for call in (rag.generate, rag.stream, lambda p, **o: rag.generate_batch([p], **o)):
        with pytest.raises(ValueError, match="empty stop string"):
            call("Where does the river flow?", stop=stop, **ASKED)


def test_one_stop_string_is_not_its_letters(make):
    rag = make(cold="never")
    text = rag.generate("Where does the river flow?", **ASKED).text
    stop = text[8:11]
    expected = text[: text.find(stop)]
    assert any(text.find(letter) < len(expected) for letter in stop)
    assert rag.generate("Where does the river flow?", stop=stop, **ASKED).text == expected
    assert "".join(rag.stream("Where does the river flow?", stop=stop, **ASKED)) == expected


async def test_the_loop_runs_while_cold_chunks_are_encoded(make, monkeypatch):
    rag, free = make(cold="now"), threading.Event()
    now, loop = rag.components.background_encoder.now, asyncio.get_running_loop()

    def waits_for_the_loop(missing):
        loop.call_soon_threadsafe(free.set)
        assert free.wait(20), "the event loop stood still"
        return now(missing)

    monkeypatch.setattr(rag.components.background_encoder, "now", waits_for_the_loop)
    assert len((await agenerate(rag, COLD, **ASKED)).token_ids) == 16


def test_streamed_text_is_the_answer_where_transformers_would_clean_up_spaces():
    words = ["it", "'", "s", ",", "the", "end", ".", "a", "\n"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    cleaning = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    tokenizer = PromptTokenizer(cleaning)
    ids = tokenizer.text("it ' s , the end .", first=True)
    detokenizer = Detokenizer(tokenizer.decode)
    streamed = "".join([*(detokenizer.push([i]) for i in ids), detokenizer.finish()])
    assert streamed == tokenizer.decode(ids) == "it ' s , the end ."
