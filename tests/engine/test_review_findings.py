"""What a review found by running things: each of these was wrong once."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from families import tokens
from ragcachekit import Chunk, Prompt, RagCache, Text, agenerate
from ragcachekit.generate.detokenizer import Detokenizer
from ragcachekit.prompt.tokenizer import PromptTokenizer
from speaking import byte_level, sentencepiece, speaker

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


def test_one_string_is_not_a_list_of_texts(make):
    rag = make(cold="never")
    for call in (rag.encode, rag.register, rag.forget, rag.generate_batch, lambda t: rag.forget(texts=t)):
        with pytest.raises(TypeError, match="not one string"):
            call("Berlin is the capital of Germany.")


@pytest.mark.parametrize("everything", [True, False])
def test_what_is_forgotten_while_it_waits_is_not_stored(make, monkeypatch, everything):
    rag = make(cold="background", encode_after=1)
    reached, go = threading.Event(), threading.Event()
    encode = rag._components.background_encoder._encoder.encode

    def slow(*arguments):
        reached.set()
        assert go.wait(60)
        yield from encode(*arguments)

    monkeypatch.setattr(rag._components.background_encoder._encoder, "encode", slow)
    use = rag.generate(COLD, **ASKED).report.link.uses[-1]
    assert reached.wait(60)  # the chunk is being encoded
    rag.forget(None if everything else [use.chunk_id])
    go.set()
    assert rag.flush(60)
    rag._components.background_encoder.close()  # what was in work is done
    assert rag.stats()[0].entries == (0 if everything else 1)  # the prefix is another entry
    assert rag.generate(COLD, **ASKED).report.link.uses[-1].source == "computed"


@pytest.mark.parametrize("begun", [True, False])
def test_a_stream_that_is_dropped_ends(make, begun):
    rag, seen = make(cold="never"), []
    generate = rag.generate
    rag.generate = lambda *a, **o: seen.append(o["cancel"]) or generate(*a, **o)
    stream = rag.stream("Where does the river flow?", **{**ASKED, "max_new_tokens": 400})
    if begun:
        next(stream)
    pool = stream._pool
    del stream
    gc.collect()
    assert pool.flush(60)
    assert seen[0].is_set()


async def test_the_loop_runs_while_cold_chunks_are_encoded(make, monkeypatch):
    rag, free = make(cold="now"), threading.Event()
    now, loop = rag._components.background_encoder.now, asyncio.get_running_loop()

    def waits_for_the_loop(missing):
        loop.call_soon_threadsafe(free.set)
        assert free.wait(20), "the event loop stood still"
        return now(missing)

    monkeypatch.setattr(rag._components.background_encoder, "now", waits_for_the_loop)
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


@pytest.mark.parametrize("way", ["metaspace", "legacy"])
@pytest.mark.parametrize("text", ["\n\nParis", "\nParis", "\n", "\n\n", "Paris", " Paris"])
def test_text_behind_a_chunk_gets_no_space_of_its_own(way, text):
    tokenizer = PromptTokenizer(sentencepiece(way))
    first = tokenizer.text("Berlin", first=True)
    assert tokenizer.decode(first + tokenizer.text(text)) == "Berlin" + text


def test_a_seed_gives_what_it_gives_without_the_library(make):
    rag, model, ids = make(cold="never"), speaker(), [i for s in COLD.segments for i in s.token_ids]
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "max_new_tokens": 12}
    batch = torch.tensor([ids])
    torch.manual_seed(5)
    plain = model.generate(batch, attention_mask=torch.ones_like(batch), **options)
    torch.manual_seed(5)
    assert rag.generate(COLD, **options).token_ids == tuple(plain[0, len(ids) :].tolist())
