"""The reader: its tokenizer loses nothing, its template adds nothing, and it reads."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import benchmarks.world.world as world_module
from benchmarks.query_cache.workload import PREFIXES
from benchmarks.world.world import make_world, messages, system_text
from soak_kit import soaked

FOLDER = Path(world_module.__file__).parent / "reader"


@pytest.fixture(scope="module")
def world():
    return make_world()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


def _plain(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_every_word_of_every_world_is_known(world, tokenizer):
    texts = [chunk for article in world.articles for chunk in article.chunks]
    texts += [text for question in world.questions for text in (question.text, question.answer)]
    texts += [*PREFIXES, system_text([])]
    texts += [text for seed in (7, 8) for q in make_world(seed).questions for text in (q.text, q.answer)]
    assert all(tokenizer.unk_token_id not in ids for ids in tokenizer(texts)["input_ids"])


def test_pieces_are_tokenised_as_they_are_within_the_whole(world, tokenizer):
    chunks = [chunk for article in world.articles[:4] for chunk in article.chunks]
    whole = system_text(chunks)
    pieces = [system_text([]), *(piece for chunk in chunks for piece in ("\n\n", chunk))]
    assert "".join(pieces) == whole
    assert [i for piece in pieces for i in _plain(tokenizer, piece)] == _plain(tokenizer, whole)


@pytest.mark.parametrize("ask", [True, False])
def test_the_chat_template_keeps_the_content_and_starts_once(tokenizer, ask):
    chat = [*messages([" Two  spaces. "], "Why?"), {"role": "assistant", "content": "Yes."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=ask)
    body = f"<|system|>{system_text([' Two  spaces. '])}</s><|user|>Why?</s><|assistant|>Yes.</s>"
    assert text == f"<s>{body}" + "<|assistant|>" * ask
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=ask)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer("Why?")["input_ids"] == [tokenizer.bos_token_id, *_plain(tokenizer, "Why?")]


@pytest.mark.parametrize(("kind", "least"), soaked([("a", 0.95), ("b", 0.95), ("c", 0.95)], ("c", 0.95)))
def test_it_answers_through_ordinary_generate(world, tokenizer, model, kind, least):
    by_title = {article.title: article for article in world.articles}
    asked = [question for question in world.questions if question.kind == kind][::17][:24]
    right = 0
    for number, question in enumerate(asked):
        others = [a for a in world.articles[number:] if a.title not in question.articles]
        articles = [by_title[title] for title in question.articles]
        articles = (articles + others)[:4]
        articles = articles[number % 4 :] + articles[: number % 4]
        chunks = [chunk for article in articles for chunk in article.chunks]
        inputs = tokenizer.apply_chat_template(
            messages(chunks, question.text), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += answer == question.answer
    assert right / len(asked) >= least
