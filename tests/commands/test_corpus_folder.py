"""A folder becomes chunks: all of its text, once, in the same order, whatever else lies there."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcachekit.commands.corpus import check_corpus, cut, read_corpus
from ragcachekit.errors import CorpusError


def squeezed(text):
    return re.sub(r"\s", "", text)


@given(
    st.text(alphabet=st.sampled_from("ab.\n \té"), max_size=200),
    st.integers(1, 12),
)
def test_cutting_loses_and_repeats_nothing(text, most):
    pieces = cut(text, most)
    assert squeezed("".join(pieces)) == squeezed(text)
    assert all(0 < len(piece.split()) <= most for piece in pieces)
    assert all(piece in text and piece == piece.strip() for piece in pieces)


@pytest.mark.parametrize(
    ("text", "most", "pieces"),
    [
        ("one two three.\n\nfour five six seven", 5, ["one two three.", "four five six seven"]),
        ("one two three\nfour five six seven", 5, ["one two three", "four five six seven"]),
        ("One two three. Four five six seven", 5, ["One two three.", "Four five six seven"]),
        ("a b c d e", 2, ["a b", "c d", "e"]),
        ("one.\n\n" + "w " * 9, 8, ["one.\n\n" + "w " * 6 + "w", "w w"]),  # no crumbs for a good seam
        (" \n ", 3, []),
    ],
)
def test_it_cuts_where_a_reader_would(text, most, pieces):
    assert cut(text, most) == pieces


def test_a_word_longer_than_a_chunk_is_divided():
    assert cut("x" * 40, 10, lambda words: [len(word) for word in words]) == ["x" * 10] * 4


def test_chunks_fit_by_the_tokenizers_own_count(minilm, tmp_path):
    text = Path(re.__file__).read_text()
    (tmp_path / "re.py").write_text(text)
    found = read_corpus(tmp_path, chunk_tokens=60, tokenizer=minilm.tokenizer)
    sizes = [len(ids) for ids in minilm.tokenizer(found.texts, add_special_tokens=False)["input_ids"]]
    assert max(sizes) <= 60
    assert sum(sizes) / len(sizes) > 30
    assert all(text in squeezed(Path(re.__file__).read_text()) for text in map(squeezed, found.texts))


def test_files_are_read_in_order_and_others_left_alone(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b.md", "sub/a.TXT", "a.rst", "picture.png", ".hidden.txt", ".git/config.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    found = read_corpus(tmp_path)
    assert [chunk.source for chunk in found.chunks] == ["a.rst", "b.md", "sub/a.TXT"]
    assert (found.files, found.notes) == (3, ())
    assert read_corpus(tmp_path) == found


def test_what_cannot_be_read_is_skipped_with_a_note(tmp_path, monkeypatch):
    (tmp_path / "good.txt").write_text("good text")
    (tmp_path / "latin.txt").write_bytes("Mühe".encode("latin-1"))
    (tmp_path / "zero.txt").write_bytes(b"a\0b")
    (tmp_path / "locked.txt").write_text("secret")
    read = Path.read_bytes

    def refuse(path):
        if path.name == "locked.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    found = read_corpus(tmp_path)
    assert found.texts == ["good text"]
    assert found.notes == (
        "skipped latin.txt: not UTF-8 text",
        "skipped locked.txt: Permission denied",
        "skipped zero.txt: a binary file",
    )


def test_a_text_that_occurs_twice_is_kept_once(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the same text")
    found = read_corpus(tmp_path)
    assert [chunk.source for chunk in found.chunks] == ["a.txt"]


def test_a_missing_or_empty_folder_says_what_to_do(tmp_path):
    with pytest.raises(CorpusError, match="does not exist; give the folder"):
        read_corpus(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CorpusError, match="is a file; give the folder"):
        read_corpus(tmp_path / "file")
    with pytest.raises(CorpusError, match=r"no text found in .*\.txt, \.md"):
        read_corpus(tmp_path)
    (tmp_path / "zero.txt").write_bytes(b"\0")
    with pytest.raises(CorpusError, match=r"\(skipped zero.txt: a binary file\)"):
        read_corpus(tmp_path)


def test_a_folder_of_pdfs_is_refused_before_a_model_is_loaded(tmp_path, command):
    (tmp_path / "paper.pdf").write_bytes(b"%PDF-1.7")
    with pytest.raises(CorpusError, match=r"no text found in .*skipped 1 \.pdf files: convert"):
        check_corpus(tmp_path)
    result = command("ask", "--corpus", tmp_path, "--model", "no such model", "Why?")
    assert result.exit_code == 2
    assert "pdftotext" in result.output
