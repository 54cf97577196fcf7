"""The manual of the standard library as chunks."""

import os
import sys

import pytest

from benchmarks.demo import manual

PAGES = [
    ("one", "\n\n".join(f"part {n} of one" for n in range(5))),
    ("two", "the second"),
    ("three", "a\n\nb c"),
]


def words(text):
    """Wordpieces, as a tokenizer with two special tokens counts them, one for each word."""
    return 2 + len(text.split())


SOME = ("argparse", "os", "sys", "sysconfig", "xml.etree.ElementTree")


@pytest.fixture(scope="module", params=[SOME, pytest.param((), marks=pytest.mark.soak)], ids=["some", "all"])
def pages(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANUAL_SECRET", "value-of-the-secret")
        return manual.pages(*request.param)


def test_the_manual_is_that_of_the_running_python(pages):
    by_name = dict(pages)
    assert set(by_name) == set(SOME) or len(by_name) > 150
    assert "Command-line parsing library" in by_name["argparse"]
    assert "class ElementTree" in by_name["xml.etree.ElementTree"]
    top = {name.partition(".")[0] for name in by_name}
    assert top <= sys.stdlib_module_names
    assert not top & manual.SKIPPED
    assert not any(name.startswith("_") for name in top)


def test_pages_say_nothing_about_this_machine_or_process(pages):
    text = "\n".join(page for _, page in pages)
    assert "value-of-the-secret" not in text
    assert sys.executable not in text
    assert os.path.dirname(os.__file__) not in text
    assert " at 0x" not in text


def test_clean_drops_sections_bars_and_rules():
    bars = f"     |  f(x=<object object at 0x7f00>)\n     |  {'-' * 70}\n     |      deeper"
    page = f"NAME\n    m - does things\n\nCLASSES\n{bars}\n\nDATA\n    environ = {{'KEY': 'secret'}}\n\n"
    page += "FUNCTIONS\n    g()\n\nFILE\n    /somewhere/m.py"
    expected = "NAME\n    m - does things\n\nCLASSES\nf(x=<object object>)\n    deeper\n\nFUNCTIONS\n    g()"
    assert manual.clean(page) == expected


@pytest.mark.parametrize(
    "text",
    ["a b c\n\nd e f\n\ng h i j k l", "one two three four five six " * 3 + "\nfourteen", "one\n\n\n\ntwo\n"],
)
@pytest.mark.parametrize("size", [11, 100])
def test_pieces_fit_and_lose_nothing(text, size):
    pieces = list(manual.cut("m", text, words, size))
    assert all(words(piece) <= size and piece.startswith("m\n") for piece in pieces)
    assert " ".join(piece.removeprefix("m\n") for piece in pieces).split() == text.split()


def test_a_word_that_is_too_long_is_cut():
    def letters(text):
        return 2 + len("".join(text.split()))

    pieces = list(manual.cut("m", "x" * 40, letters, 15))
    assert "".join(piece.removeprefix("m\n").strip() for piece in pieces) == "x" * 40
    assert [letters(piece) for piece in pieces] == [15, 15, 15, 7]


def test_every_module_gives_its_first_chunk_before_any_gives_its_second(monkeypatch):
    monkeypatch.setattr(manual, "pages", lambda: PAGES)
    found = manual.chunks(words, limit=4, size=11)
    assert [chunk.partition("\n")[0] for chunk in found] == ["one", "one", "two", "three"]
    assert len(manual.chunks(words, limit=2, size=11)) == 2
    assert len(manual.chunks(words, limit=None, size=11)) > 4
    with pytest.raises(ValueError, match="no room"):
        manual.chunks(words, limit=2, size=5)
