"""Which documents of a prompt are found as chunks, and why others are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import uuid4

from ragcachekit.prompt.differences import Difference, difference
from ragcachekit.prompt.parser import NO_TEMPLATE, PromptLike, PromptParser
from ragcachekit.prompt.registry import is_inside_word
from ragcachekit.prompt.segments import Segmentation
from ragcachekit.reports import Report
from ragcachekit.reports.base import shorten
from ragcachekit.types import Chunk, Prompt

_UNALTERED = "join the documents' own text (page_content, get_content()) without altering it"
ADVICE = {
    "not registered": "wrap the retriever, or give the text to register or encode, in the call's namespace",
    "too short": "mark it as a chunk (a content block with 'chunk': True), or split less finely",
    "word runs on": "put a blank line between the chunk and the text beside it",
    "overlapped": "another chunk that overlaps it is reused instead; split with chunk_overlap=0",
    "template": "mark the chunks, or give the model a chat template that leaves contents as they are",
    "printed as Python": f"the prompt prints document objects or a list: {_UNALTERED}",
    "JSON-escaped": f"the text went through json.dumps: {_UNALTERED}",
    "HTML-escaped": "switch autoescape off in the prompt's template (Jinja: autoescape=False, or | safe)",
    "whitespace": f"lines were re-wrapped, indented or stripped: {_UNALTERED}",
    "Unicode form": "normalise texts once, before they are indexed, and not in the prompt",
    "upper or lower case": f"its case was changed: {_UNALTERED}",
    "truncated": "raise the limit that cuts it (context window, prompt helper), or retrieve fewer chunks",
    "beginning missing": "leave the text before the split as it is, or register what the prompt holds",
    "both ends missing": "register what the prompt holds: a compressor or window took a part of it",
    "cut into pieces": "other text is in between: put metadata before the text, and do not split it again",
    "altered": f"words differ: {_UNALTERED}",
    "absent": "it is not in this prompt: look at k, filters, a reranker, or a limit that drops documents",
}
"""What to do, by the reason why a document is not found."""


@dataclass(frozen=True)
class ChunkDiagnosis(Report):
    """What became of one document in a prompt.

    - ``number``: Its place among the documents, from 1; ``text`` is its beginning.
    - ``why``: ``found``, or a key of :data:`ADVICE`; ``advice`` is what to change.
    - ``document``, ``prompt``: Characters around the first difference, in the document and in the prompt.
    """

    number: int
    text: str
    found: bool
    why: str
    document: str = ""
    prompt: str = ""
    advice: str = ""

    def __str__(self) -> str:
        lines = [f"{'ok  ' if self.found else 'MISS'} {self.number}. {self.text!r}: {self.why}"]
        if self.document or self.prompt:
            lines += [f"       document: {self.document!r}", f"       prompt:   {self.prompt!r}"]
        return "\n".join([*lines, f"       -> {self.advice}"] if self.advice else lines)


@dataclass(frozen=True)
class Diagnosis(Report):
    """What :meth:`ragcachekit.RagCache.diagnose` found: one entry per document, and notes on the prompt."""

    chunks: tuple[ChunkDiagnosis, ...]
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[ChunkDiagnosis, ...]:
        """The documents that are not found as chunks."""
        return tuple(chunk for chunk in self.chunks if not chunk.found)

    def __str__(self) -> str:
        found = len(self.chunks) - len(self.missing)
        head = f"{found} of {len(self.chunks)} documents are found as chunks"
        return "\n".join([head, *map(str, self.chunks), *(f"note: {note}" for note in self.notes)])


def diagnose(
    parser: PromptParser, prompt: PromptLike, documents: Iterable[object], namespace: str | None = None
) -> Diagnosis:
    """Diagnose a prompt; ``namespace`` None takes all documents for registered.

    ``documents`` are strings, or objects with ``page_content`` or ``get_content()``; TypeError for others.
    """
    texts = [text_of(document, number) for number, document in enumerate(documents, 1)]
    ideal = _as_registered(parser, prompt, texts)
    real = ideal if namespace is None else parser.segment(prompt, namespace)
    known = {text.strip() for text in (texts if namespace is None else parser.registry.texts(namespace))}
    found, possible, whole = _chunks(real), _chunks(ideal), _text(real)
    chunks = []
    for number, text in enumerate(texts, 1):
        body = text.strip()
        if body in found:
            why = Difference("found")
        elif real.fallback is not None and body in whole:
            why = Difference("template")
        elif len(body) < parser.registry.min_chars:
            why = Difference("too short")
        elif body in possible:
            why = Difference("overlapped" if body in known else "not registered")
        elif body in whole:
            why = _at_its_edges(body, whole)
        else:
            why = difference(text, whole)
        shown = (number, shorten(" ".join(text.split()), 50), why.why == "found")
        chunks.append(ChunkDiagnosis(*shown, *why, ADVICE.get(why.why, "")))
    return Diagnosis(tuple(chunks), tuple(_notes(parser, prompt, real, whole)))


def text_of(document: object, number: int = 1) -> str:
    """The text of a string, a LangChain document or a LlamaIndex node; TypeError for anything else."""
    text = getattr(document, "page_content", document)
    text = text.get_content() if hasattr(text, "get_content") else text
    if not isinstance(text, str):
        kind = type(document).__name__
        raise TypeError(f"document {number} is a {kind}; give a string, or what has page_content")
    return text


def _as_registered(parser: PromptParser, prompt: PromptLike, texts: Sequence[str]) -> Segmentation:
    scratch = uuid4().hex
    parser.registry.add(scratch, texts)
    try:
        return parser.segment(prompt, scratch)
    finally:
        parser.registry.clear(scratch)


def _chunks(segmentation: Segmentation) -> set[str]:
    return {(s.text or "").strip() for s in segmentation.segments if isinstance(s, Chunk)}


def _text(segmentation: Segmentation) -> str:
    return "".join(segment.text or "" for segment in segmentation.segments)


def _at_its_edges(body: str, whole: str) -> Difference:
    at = whole.index(body)
    end = at + len(body)
    if is_inside_word(whole, at) or is_inside_word(whole, end):
        edge = at if is_inside_word(whole, at) else end
        return Difference(
            "word runs on", body[:24] if edge == at else body[-24:], whole[edge - 12 : edge + 24]
        )
    return Difference("overlapped")


def _notes(parser: PromptParser, prompt: PromptLike, real: Segmentation, whole: str) -> Iterable[str]:
    if real.fallback is not None:
        yield f"the whole prompt is computed in full: {real.fallback}"
    elif parser.lacks_template(prompt):
        yield NO_TEMPLATE
    elif not isinstance(prompt, str | Prompt):
        yield f"the chat template makes {len(whole)} characters of the messages, contents unaltered"
    yield from real.notes
