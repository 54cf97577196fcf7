"""``ragcachekit doctor``: why was nothing reused? A prompt and its documents, from files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from json import JSONDecodeError, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragcachekit.commands import options as opt
from ragcachekit.commands.workspace import load_tokenizer
from ragcachekit.errors import RagCacheError

if TYPE_CHECKING:
    from ragcachekit.engine.inspection import Diagnosis
    from ragcachekit.prompt.parser import PromptLike


def doctor(
    prompt: Annotated[
        str,
        typer.Argument(help="File with the prompt as the model gets it, text or JSON messages; - reads it."),
    ] = "",
    documents: Annotated[
        list[Path] | None,
        typer.Option("--documents", "-d", help="What was retrieved: text files, .jsonl, a folder of them."),
    ] = None,
    model: opt.OptionalModel = None,
) -> None:
    """Show which documents of a prompt are found as chunks, why others are not, and what to change.

    Ends with 1 if some are not found. Only the tokenizer and the chat template of --model are loaded;
    check-model shows its grade.
    """
    if not prompt:
        raise RagCacheError("give the prompt's file, and --documents")
    text = sys.stdin.read() if prompt == "-" else _read(Path(prompt))
    diagnosis = run(read_prompt(text), read_documents(documents or []), model)
    typer.echo(str(diagnosis))
    if diagnosis.missing:
        raise typer.Exit(1)


def run(prompt: PromptLike, documents: Iterable[object], model: str | None = None) -> Diagnosis:
    """Diagnose a prompt with the tokenizer and chat template of ``model``; without it, a text alone."""
    documents = list(documents)
    if not documents:
        raise RagCacheError("there are no documents; give what the retriever returned with --documents")
    if model is None and not isinstance(prompt, str):
        raise RagCacheError("chat messages need a chat template; give --model")
    from ragcachekit.engine.inspection import diagnose, text_of
    from ragcachekit.prompt.parser import PromptParser

    texts = [text_of(document, number) for number, document in enumerate(documents, 1)]
    return diagnose(PromptParser(None if model is None else load_tokenizer(model)), prompt, texts)


def read_prompt(text: str) -> PromptLike:
    """A prompt as text, or JSON: chat messages, or an object with ``messages``."""
    try:
        found = loads(text)
    except JSONDecodeError:
        return text
    found = found.get("messages", found) if isinstance(found, dict) else found
    is_chat = isinstance(found, list) and found and all(isinstance(m, dict) and "role" in m for m in found)
    return found if is_chat else text


def read_documents(paths: Sequence[Path]) -> list[str]:
    """Documents of text files (one each), of ``.jsonl`` files (one per line), and of folders of either.

    A line is a string, or an object with ``page_content`` or ``text``. RagCacheError for anything else.
    """
    documents: list[str] = []
    for path in paths:
        if path.is_dir():
            documents += read_documents(sorted(p for p in path.iterdir() if p.is_file()))
            continue
        text = _read(path)
        if path.suffix == ".jsonl":
            lines = enumerate(text.splitlines(), 1)
            documents += [_line(path, number, line) for number, line in lines if line.strip()]
        else:
            documents.append(text)
    return documents


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RagCacheError(f"{path} cannot be read as text: {error}") from error


def _line(path: Path, number: int, line: str) -> str:
    try:
        found: Any = loads(line)
    except JSONDecodeError:
        found = None
    if isinstance(found, dict):
        found = found.get("page_content", found.get("text"))
    if not isinstance(found, str):
        raise RagCacheError(
            f"{path}, line {number}: give a JSON string, or an object with page_content or text"
        )
    return found
