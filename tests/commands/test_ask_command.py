"""ragcachekit ask: answers from one's own files, and what the second question reuses."""

import errno
import re
import shutil

import pytest

from benchmarks.world.reader_folder import READER
from ragcachekit.commands.ask import open_session
from ragcachekit.commands.corpus import read_corpus
from ragcachekit.commands.questions import PromptMaker
from ragcachekit.commands.workspace import CacheFolder, OwnFiles, load_tokenizer
from ragcachekit.errors import RagCacheError

SMALL = ("--chunk-tokens", "34")


def reused(output):
    """(tokens reused, of them exactly), per answer."""
    found = re.findall(r"tokens: (\d+) reused(?: from [a-z ]+ \((\d+) exactly\))?", output)
    return [(int(all_), int(exact or 0)) for all_, exact in found]


@pytest.fixture
def question(world):
    """One that a single chunk answers, and the answer."""
    asked = next(q for q in world.questions if q.kind == "a" and q.relation == "birthplace")
    return asked.text, asked.answer


@pytest.fixture
def ask(command, corpus, one_minilm, prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "cache")

    def run(*arguments, model=READER, folder=corpus, **options):
        cache = tmp_path / "cache"
        return command(
            "ask", "--corpus", folder, "--model", model, "--cache", cache, *SMALL, *arguments, **options
        )

    return run


def test_the_second_process_reuses_what_the_first_computed(ask, question):
    text, answer = question
    first, second = ask(text), ask(text)
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert first.stdout.startswith(answer + "\n")
    assert second.stdout.startswith(answer + "\n")
    assert reused(first.stdout) == [(0, 0)]
    ((count, exact),) = reused(second.stdout)
    assert 0 < exact < count
    assert re.search("reused from (disk|host)", second.stdout)  # host: what was read ahead


def test_a_disk_that_is_too_small_is_named(ask, question):
    small, ample = ask(question[0], "--disk-gb", "0.000001"), ask(question[0])
    assert "not kept" in small.stdout
    assert "--disk-gb" in small.stdout
    assert "not kept" not in ample.stdout


def test_a_repeated_question_is_not_searched_again(ask, question):
    text, answer = question
    result = ask(text, f"I wonder: {text}", text, "--policy", "reuse")
    assert re.findall(r"query cache (miss|hit)", result.stdout) == ["miss", "miss", "hit"]
    assert "hit at distance 0.000" in result.stdout
    assert result.stdout.count(f"\n{answer}\n") >= 1
    counts = [count for count, _ in reused(result.stdout)]
    assert counts[0] == 0 < counts[2]
    near = ask(text, f"I wonder: {text}", "--tolerance", "0.4")
    assert re.findall(r"query cache (miss|hit)", near.stdout) == ["miss", "hit"]


def test_questions_come_from_the_input_too(ask, question):
    text, answer = question
    result = ask(input=f"{text}\n\n  \n{text}\n")  # a blank line does not end the input
    assert len(reused(result.stdout)) == 2
    assert result.stdout.startswith(answer)


def test_only_changed_texts_are_embedded_again(ask, question, corpus, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for file in sorted(corpus.iterdir())[:4]:
        (folder / file.name).write_text(file.read_text())
    ask(question[0], folder=folder)
    (folder / "zzz.txt").write_text("A note about the weather, which was fine.")
    assert "embedding 1 of" in ask(question[0], folder=folder).output
    (folder / "zzz.txt").unlink()
    result = ask("What was the weather?", "-k", "40", folder=folder)
    assert "embedding" not in result.output
    assert "zzz.txt" not in result.output


def test_a_damaged_index_is_built_anew(ask, question, tmp_path):
    ask(question[0])
    (database,) = (tmp_path / "cache" / "indexes").glob("*/documents/cache.db")
    database.write_bytes(b"no database")
    result = ask(question[0])
    assert result.exit_code == 0
    assert "rebuilt" in result.output
    assert "rebuilt" not in ask(question[0]).output


ONE_MESSAGE = (
    "{%- for m in messages -%}"
    "{%- if m['role'] != 'user' -%}{{ raise_exception('users only') }}{%- endif -%}"
    "{{ '<|user|>' + m['content'] + eos_token }}{%- endfor -%}<|assistant|>"
)


@pytest.mark.parametrize("template", [None, ONE_MESSAGE])
def test_a_prompt_is_plain_or_one_message_where_the_model_takes_no_other(
    ask, question, reader_copy, template
):
    model = reader_copy(template)
    prompt = PromptMaker(load_tokenizer(str(model)))
    assert prompt.chat == (template is not None)
    assert prompt.before.removeprefix("<|user|>") == "Answer the question from the context.\n\n"
    first = ask(question[0], "--max-new-tokens", "4", model=model)
    second = ask(question[0], "--max-new-tokens", "4", model=model)
    assert first.exit_code == 0
    assert reused(second.stdout)[0][0] > reused(first.stdout)[0][0] == 0


def test_an_unusable_template_is_refused(reader_copy):
    model = reader_copy("{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match="takes no user message"):
        PromptMaker(load_tokenizer(str(model)))


def test_the_text_before_the_chunks_is_that_of_the_prompt(corpus, one_minilm, prepared, tmp_path):
    """Chunks encoded after it are exact where they come first."""
    shutil.copytree(prepared, tmp_path / "cache")
    cache = str(tmp_path / "cache")
    settings = OwnFiles(str(corpus), READER, policy="reuse", encoder="system", cache=cache, chunk_tokens=34)
    text = read_corpus(corpus, chunk_tokens=34, tokenizer=load_tokenizer(READER)).texts
    with open_session(settings) as session:
        session.rag.encode(text, system=PromptMaker(session.rag.tokenizer).before)
        link = session.ask("Where is it?").answer.report.link
    first = next(chunk for chunk in link.chunks if chunk.source != "computed")
    assert link.exact_tokens == first.tokens > 0
    assert link.approximate_tokens > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tolerance", "nan"), "tolerance"),
        (("--max-new-tokens", "0"), "Invalid value for '--max-new-tokens'"),
        ((" ",), "the question is empty"),
    ],
)
def test_bad_arguments_are_one_line(ask, arguments, message):
    result = ask("Why?", *arguments) if arguments[0].startswith("-") else ask(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_missing_model_or_corpus_says_what_to_do(command, ask, corpus, tmp_path):
    for model in (tmp_path / "nowhere", "./nowhere", tmp_path):
        result = ask("Why?", model=model)
        assert result.exit_code == 2
        assert "cannot load the model" in result.output
        assert "give the folder of a Hugging Face model or a hub id" in result.output
    result = command("ask", "--corpus", corpus, "Why?")
    assert result.exit_code == 2
    assert "Give --model with the folder" in result.output
    (tmp_path / "empty").mkdir()
    result = ask("Why?", folder=tmp_path / "empty")
    assert result.exit_code == 2
    assert "no text found" in result.output


@pytest.fixture
def no_embedding(monkeypatch):
    def embed(self, texts, **options):
        raise AssertionError("embedded before the checks")

    monkeypatch.setattr("ragcachekit.commands.embedding.MiniLM.embed", embed)


@pytest.mark.parametrize("name", ["ask", "precompute", "estimate", "calibrate"])
def test_a_cache_folder_that_takes_nothing_is_refused_first(
    name, command, corpus, tmp_path, no_embedding, monkeypatch
):
    def refused(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("ragcachekit.commands.workspace.tempfile.TemporaryDirectory", refused)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)  # nothing is loaded, either
    (tmp_path / "log").write_text("Why?\n")
    last = {"ask": ("Why?",), "estimate": ("--log", tmp_path / "log")}.get(name, ())
    result = command(name, "--corpus", corpus, "--model", READER, "--cache", tmp_path / "ro" / "cache", *last)
    assert result.exit_code == 2
    assert f"{tmp_path}: Read-only file system); choose another --cache" in result.output
    assert "\n" not in result.output.strip()


def test_the_check_of_the_cache_folder_leaves_nothing(tmp_path):
    CacheFolder(tmp_path / "a" / "b").check_writable()
    assert not list(tmp_path.iterdir())
    (tmp_path / "kv").write_text("x")
    with pytest.raises(RagCacheError, match="kv: it is a file"):
        CacheFolder(tmp_path).check_writable()


def test_the_policies_and_encoders_that_the_help_names_exist(command):
    from ragcachekit.commands import options
    from ragcachekit.policies.registry import open_policy

    helps = options.Policy.__metadata__[0].help
    named = helps.partition(": ")[2].partition(" (")[0].split(", ")
    assert {"sensitive:0.1", "budget:0.05"} <= set(named)
    for name in named:
        open_policy(name.rstrip("."))
