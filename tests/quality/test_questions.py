"""What the fidelity bench asks, and how it becomes a prompt."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.world.questions import world_questions
from benchmarks.world.reader_folder import READER
from benchmarks.world.world import messages
from ragcachekit.commands.questions import PromptMaker, Question, read_questions
from ragcachekit.errors import RagCacheError


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(READER)


def test_questions_of_a_file(tmp_path: Path) -> None:
    lines = [
        {"question": "Q?", "chunks": ["one", "two"], "answer": "A"},
        {"question": "R?", "chunks": ["one"], "answer": "B", "type": "hard", "id": 7},
    ]
    path = tmp_path / "q.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    one, two = read_questions(path)
    assert one == Question("Q?", ("one", "two"), ("A",))
    assert two.question_type == "hard"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ("[1]", "line 2: give an object"),
        ('{"question": "Q?", "chunks": ["c"]}', "line 2: 'answer' missing"),
        ('{"question": "Q?", "chunks": "c", "answer": "A"}', "line 2: 'chunks' must be a list"),
        ('{"question": "Q?", "chunks": [], "answer": "A"}', "line 2: 'chunks' must be a list"),
        ('{"question": "Q?", "chunks": ["c", " "], "answer": "A"}', "line 2: chunk 2 must be a text"),
        ('{"question": 3, "chunks": ["c"], "answer": "A"}', "line 2: question must be a text"),
        ('{"question": "Q?", "chunks": ["c"], "answer": "A", "type": "all"}', "line 2: 'type'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "Q?", "chunks": ["c"], "answer": "A"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_questions(path)


def test_a_log_has_plain_questions_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    line = json.dumps({"question": "Where?", "chunks": ["a.txt#0", "Some text."], "user": "me"})
    path.write_text(f"\ufeff{line}\n\nWhy?\n", encoding="utf-8")
    questions = [Question("Where?", ("a.txt#0", "Some text.")), Question("Why?", ())]
    assert read_questions(path, ["question"]) == questions
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="log: 'utf-8' codec"):
        read_questions(path, ["question"])
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no questions; give"):
        read_questions(path, ["question"])


def test_a_prompt_is_what_the_reader_was_trained_on(tokenizer) -> None:
    (question,) = world_questions(0, 1)[:1]
    prompt = PromptMaker(tokenizer).prompt(question)
    whole = tokenizer.apply_chat_template(
        messages(question.chunks, question.question), add_generation_prompt=True, return_dict=True
    )
    assert list(prompt.token_ids) == whole["input_ids"]
    assert prompt.prompt == messages(question.chunks, question.question)


def test_a_model_without_chat_template_is_asked_in_plain_text(tokenizer) -> None:
    question = Question("Where?", ("One town.", "Two towns."), ("here",))
    tokenizer.chat_template = None
    maker = PromptMaker(tokenizer)
    prompt = maker.prompt(question)
    text = f"{prompt.before}One town.\n\nTwo towns.\n\nQuestion: Where?\nAnswer:"
    assert list(prompt.token_ids) == tokenizer(text).input_ids
    assert maker.stop == ("\nQuestion:",)


def test_a_template_that_changes_chunks_is_refused(tokenizer) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises((RagCacheError, ValueError), match="chat template"):
        PromptMaker(tokenizer).prompt(Question("Where?", ("One town.",), ("here",)))
