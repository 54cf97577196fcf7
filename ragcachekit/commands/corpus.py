"""A folder of the user's own texts, cut into chunks reproducibly."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ragcachekit.errors import CorpusError

SUFFIXES = (".txt", ".md", ".rst", ".py")
UNREAD = frozenset(
    ".html .htm .pdf .docx .doc .odt .pptx .xlsx .epub .rtf .ipynb .csv".split()  # noqa: SIM905
)
"""Documents that have text and are not read; other kinds (pictures, archives) are left out unnamed."""
CONVERT = "convert them to text first (pdftotext, pandoc, markitdown)"
DEFAULT_CHUNK_TOKENS = 200
"""Below the 256 wordpieces that the embedding model reads."""

_WORD = re.compile(r"\s*\S+")

Count = Callable[[Sequence[str]], list[int]]
"""Function giving the tokens of each word, including the white space before it."""


@dataclass(frozen=True)
class CorpusChunk:
    """One chunk: its text, the file it is from (relative to the folder), its number in that file."""

    text: str
    source: str
    number: int

    @property
    def id(self) -> str:
        """SHA-256 of the text, which changes of other files do not affect."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """Chunks of a folder by file and place, each text once; ``notes`` name what was skipped."""

    chunks: tuple[CorpusChunk, ...]
    files: int
    notes: tuple[str, ...]

    @property
    def texts(self) -> list[str]:
        return [chunk.text for chunk in self.chunks]

    @cached_property
    def by_id(self) -> dict[str, CorpusChunk]:
        return {chunk.id: chunk for chunk in self.chunks}


def read_corpus(
    folder: str | os.PathLike[str], *, chunk_tokens: int = DEFAULT_CHUNK_TOKENS, tokenizer: Any = None
) -> Corpus:
    """Read every text file below ``folder`` with one of :data:`SUFFIXES`; hidden ones are skipped.

    ``chunk_tokens`` are counted word by word (tokenizers that look beyond words may differ by one or two);
    without a tokenizer they are words. CorpusError if the folder is missing or holds no text.
    """
    root, notes = Path(folder).expanduser(), list[str]()
    chunks, files = dict[str, CorpusChunk](), 0
    for path in _files(root, notes):
        text = _read(path, root, notes)
        files += text is not None
        source = path.relative_to(root).as_posix()
        for number, piece in enumerate(cut(text or "", chunk_tokens, _counter(tokenizer))):
            chunks.setdefault(piece, CorpusChunk(piece, source, number))
    if not chunks:
        raise _no_text(root, notes)
    return Corpus(tuple(chunks.values()), files, tuple(notes))


def check_corpus(folder: str | None) -> str | None:
    """The folder as it was given; CorpusError if it has no text files."""
    if folder is not None:
        _files(Path(folder).expanduser(), [])
    return folder


def _no_text(root: Path, notes: Sequence[str]) -> CorpusError:
    skipped = f" ({'; '.join(notes[:3])})" if notes else ""
    return CorpusError(f"no text found in {root}{skipped}; put files there that end in {', '.join(SUFFIXES)}")


def documents(chunks: Iterable[CorpusChunk]) -> list[list[str]]:
    """The chunks' texts by file, in order."""
    files = defaultdict[str, list[str]](list)
    for chunk in chunks:
        files[chunk.source].append(chunk.text)
    return list(files.values())


def cut(text: str, chunk_tokens: int, count: Count | None = None) -> list[str]:
    """Cut a text into pieces of at most ``chunk_tokens``, at paragraphs, lines or sentences if possible.

    Every chunk is a substring of ``text`` without outer white space; no word is lost or repeated.
    """
    counted = count or (lambda words: [1] * len(words))
    words = list(_fitting(_WORD.findall(text), chunk_tokens, counted))
    sizes = _sizes(words, counted)
    chunks, start = [], 0
    while start < len(words):
        end, tokens, half = start, 0, start
        while end < len(words) and (end == start or tokens + sizes[end] <= chunk_tokens):
            tokens += sizes[end]
            end += 1
            half = half if tokens > chunk_tokens // 2 else end
        if end < len(words):  # the best boundary in the second half, the last one of equals
            end = max(range(max(half, start + 1), end + 1), key=lambda at: (_seam(words, at), at))
        chunks.append("".join(words[start:end]).strip())
        start = end
    return chunks


def _seam(words: Sequence[str], at: int) -> int:
    """Quality of the boundary before ``words[at]``: paragraph, line, sentence, word, none."""
    blank = words[at][: len(words[at]) - len(words[at].lstrip())]
    if blank.count("\n") > 1:
        return 4
    if "\n" in blank:
        return 3
    if words[at - 1].endswith((".", "!", "?")):
        return 2
    return int(bool(blank))


def _fitting(words: Sequence[str], most: int, count: Count) -> Iterator[str]:
    """Words, with those longer than a whole chunk (base64, say) cut in halves."""
    for word, size in zip(words, _sizes(words, count), strict=True):
        if size <= most or len(word) == 1:
            yield word
        else:
            yield from _fitting((word[: len(word) // 2], word[len(word) // 2 :]), most, count)


def _sizes(words: Sequence[str], count: Count) -> list[int]:
    distinct = list(dict.fromkeys(words))
    known = dict(zip(distinct, count(distinct) if distinct else [], strict=True))
    return [known[word] for word in words]


def _counter(tokenizer: Any) -> Count | None:
    def count(words: Sequence[str]) -> list[int]:
        found = tokenizer(list(words), add_special_tokens=False, verbose=False)["input_ids"]
        return [len(ids) for ids in found]

    return None if tokenizer is None else count


def _files(root: Path, notes: list[str]) -> list[Path]:
    """The text files, sorted; CorpusError if there is none."""
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise CorpusError(f"the corpus folder {root} {what}; give the folder that holds your documents")
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*")}
    seen = [
        path for name, path in sorted(paths.items()) if not re.search(r"(^|/)\.", name) and path.is_file()
    ]
    unread = Counter(path.suffix.lower() for path in seen)
    if kinds := [f"{unread[kind]} {kind}" for kind in sorted(unread.keys() & UNREAD)]:
        notes.append(f"skipped {', '.join(kinds)} files: {CONVERT}")
    if not (found := [path for path in seen if path.suffix.lower() in SUFFIXES]):
        raise _no_text(root, notes)
    return found


def _read(path: Path, root: Path, notes: list[str]) -> str | None:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        why = "a binary file" if "\0" in text else None
    except OSError as error:
        why = error.strerror
    except UnicodeDecodeError:
        why = "not UTF-8 text"
    if why is not None:
        notes.append(f"skipped {path.relative_to(root).as_posix()}: {why}")
        return None
    return text.replace("\r\n", "\n")
