"""What a prompt reuses (``inspect``), and why documents are not found in it (``diagnose``)."""

from __future__ import annotations

import html
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from typing import NamedTuple
from uuid import uuid4

from rich.console import Console
from rich.text import Text as RichText

from ragcachekit.plan.link_plan import COMPUTED, LinkPlan, chunks_of
from ragcachekit.plots import COLOURS, MeasuredPolicy
from ragcachekit.prompt.parser import NO_TEMPLATE, PromptLike, PromptParser
from ragcachekit.prompt.segments import Segmentation, is_inside_word
from ragcachekit.quality.auto import AutoPolicies
from ragcachekit.quality.records import Budgets
from ragcachekit.reports import LinkReport, Report, shorten
from ragcachekit.types import Chunk, Prompt

PIECE = 16  # characters that are in a prompt by no accident
PRESENT = 0.3  # share of a document's pieces; with fewer in a prompt it is not there
_CHANGES: dict[str, Callable[[str, str], bool]] = {
    "printed as Python": lambda text, prompt: repr(text)[1:-1] in prompt,
    "JSON-escaped": lambda text, prompt: json.dumps(text)[1:-1] in prompt,
    "HTML-escaped": lambda text, prompt: text in html.unescape(prompt),
    "whitespace": lambda text, prompt: " ".join(text.split()) in " ".join(prompt.split()),
}

_CONTEXT = 4  # tokens before a segment that it is decoded after, for its leading space
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class PromptPiece(Report):
    """Tokens of one segment that were treated alike.

    - ``chunk``: Number of the chunk, from 1; 0 for fixed text.
    - ``how``: ``exact``, ``approximate``, ``recomputed`` (cached, and computed again) or ``computed``.
    - ``source``: Tier of its KV, or ``computed``.
    """

    text: str
    tokens: int
    chunk: int
    how: str
    source: str


@dataclass(frozen=True, repr=False)
class PromptView(Report):
    """What :meth:`ragcachekit.RagCache.inspect` returns; notebooks and ``rich.print`` show it in colours."""

    pieces: tuple[PromptPiece, ...]
    report: LinkReport

    @property
    def tokens(self) -> dict[str, int]:
        """Number of tokens by how their KV was had."""
        counts = Counter[str]()
        for piece in self.pieces:
            counts[piece.how] += piece.tokens
        return {how: counts[how] for how in COLOURS}

    def __repr__(self) -> str:
        return f"PromptView({self._legend()})"

    def __str__(self) -> str:
        lines = [self._legend()]
        for number, pieces in _by_segment(self.pieces):
            hows = Counter[str]()
            for piece in pieces:
                hows[piece.how] += piece.tokens
            counts = ", ".join(f"{count} {how}" for how, count in hows.items())
            text = "".join(piece.text for piece in pieces)
            lines.append(f"{_label(number):9} {counts} [{pieces[0].source}] {text!r}")
        return "\n".join([*lines, *self._why()])

    def __rich__(self) -> RichText:
        text = RichText()
        for how, count in self.tokens.items():
            text.append(f" {how} {count} ", style=f"#1b1b1b on {COLOURS[how]}").append(" ")
        text.append("\n")
        for number, pieces in _by_segment(self.pieces):
            if number:
                text.append(f"[{number} {pieces[0].source}]", style="bold")
            for piece in pieces:
                text.append(piece.text, style=f"#1b1b1b on {COLOURS[piece.how]}")
        return text.append("\n".join(["", *self._why()]), style="italic")

    def _repr_html_(self) -> str:
        console = Console(file=StringIO(), record=True, force_jupyter=False)
        console.print(self, soft_wrap=True)
        pre = "<pre style='white-space:pre-wrap'>{code}</pre>"
        return console.export_html(inline_styles=True, code_format=pre)

    def _legend(self) -> str:
        counts = ", ".join(f"{how} {count}" for how, count in self.tokens.items())
        return f"{counts} tokens; {self.report.policy}, encoder {self.report.encoder}"

    def _why(self) -> list[str]:
        fallback = [f"computed in full: {self.report.fallback}"] if self.report.fallback else []
        return [*fallback, *self.report.notes]


def prompt_view(plan: LinkPlan, decode: Decode) -> PromptView:
    """The view of a plan as it ran; ``decode`` keeps special tokens."""
    assert plan.request is not None, "planned from a prompt"
    how, source = ["computed"] * len(plan.token_ids), [COMPUTED] * len(plan.token_ids)
    remaining = iter(plan.placed)
    cached = [use for use in plan.report.uses if use.source != COMPUTED]
    for tier, placed in ((use.source, chunk) for use in cached for chunk in chunks_of(use, remaining)):
        at = slice(placed.start, placed.stop)
        how[at] = ["exact" if placed.is_exact else "approximate"] * placed.tokens
        source[at] = [tier] * placed.tokens
    for row in plan.rows:
        how[row] = "computed" if source[row] == COMPUTED else "recomputed"
    start, chunks, pieces = 0, 0, list[PromptPiece]()
    for segment in plan.request.segments:
        ids = segment.token_ids
        chunks += segment.is_chunk
        runs = [list(run) for _, run in groupby(range(start, start + len(ids)), how.__getitem__)]
        ends = [run[-1] + 1 - start for run in runs]
        texts = _texts(decode, plan.token_ids[max(start - _CONTEXT, 0) : start], ids, ends)
        for run, text in zip(runs, texts, strict=True):
            number = chunks if segment.is_chunk else 0
            pieces.append(PromptPiece(text, len(run), number, how[run[0]], source[run[0]]))
        start += len(ids)
    return PromptView(tuple(pieces), plan.report)


def _texts(decode: Decode, before: Sequence[int], ids: Sequence[int], ends: Sequence[int]) -> Iterator[str]:
    """The texts of the tokens up to each of ``ends``; a character goes where its last token is."""
    done = len(decode(before)) if before else 0
    for end in ends:
        text = decode([*before, *ids[:end]])
        text = text if end == len(ids) else text.rstrip("\N{REPLACEMENT CHARACTER}")
        yield text[done:]
        done = max(done, len(text))


def _by_segment(pieces: Sequence[PromptPiece]) -> Iterator[tuple[int, list[PromptPiece]]]:
    for number, group in groupby(pieces, lambda piece: piece.chunk):
        yield number, list(group)


def _label(number: int) -> str:
    return f"chunk {number}" if number else "text"


# -- documents that are not found ------------------------------------------------------------------

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
    "truncated": "raise the limit that cuts it (context window, prompt helper), or retrieve fewer chunks",
    "altered": f"words differ, or a part is missing: {_UNALTERED}",
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
    parser: PromptParser, prompt: PromptLike, documents: Iterable[object], namespace: str
) -> Diagnosis:
    """Diagnose a prompt.

    ``documents`` are strings, or objects with ``page_content`` or ``get_content()``; TypeError for others.
    """
    texts = [text_of(document, number) for number, document in enumerate(documents, 1)]
    ideal = _as_registered(parser, prompt, texts, namespace)
    real = parser.segment(prompt, namespace)
    known = {text.strip() for text in parser.registry.texts(namespace)}
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
            at = whole.index(body)
            runs_on = is_inside_word(whole, at) or is_inside_word(whole, at + len(body))
            why = Difference("word runs on" if runs_on else "overlapped")
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


def _as_registered(
    parser: PromptParser, prompt: PromptLike, texts: Sequence[str], namespace: str
) -> Segmentation:
    scratch = uuid4().hex
    parser.registry.add(scratch, texts, parser.registry.named(namespace))
    try:
        return parser.segment(prompt, scratch)
    finally:
        parser.registry.forget(scratch, None)


def _chunks(segmentation: Segmentation) -> set[str]:
    return {(s.text or "").strip() for s in segmentation.segments if isinstance(s, Chunk)}


def _text(segmentation: Segmentation) -> str:
    return "".join(segment.text or "" for segment in segmentation.segments)


class Difference(NamedTuple):
    """Kind of difference, and the characters around the first one in the document and in the prompt."""

    why: str
    document: str = ""
    prompt: str = ""


def difference(text: str, prompt: str) -> Difference:
    """What ``prompt`` made of ``text``, which it does not hold verbatim."""
    text, end = text.strip(), 0
    if text[:PIECE] in prompt:  # as long as its beginning is there, so is each shorter one
        end = bisect_left(range(1, len(text) + 1), True, key=lambda length: text[:length] not in prompt)
    at = prompt.index(text[:end]) + end
    shown = (text[max(end - 12, 0) : end + 24], prompt[max(at - 12, 0) : at + 24]) if end else (text[:24],)
    for why, holds in _CHANGES.items():
        if holds(text, prompt):
            return Difference(why, *shown)
    pieces = [text[start : start + PIECE] in prompt for start in range(0, len(text) - PIECE + 1, PIECE)]
    if sum(pieces) < PRESENT * max(len(pieces), 1):
        return Difference("absent")
    goes_on = any(text[start : start + PIECE] in prompt for start in range(end, len(text) - PIECE + 1, PIECE))
    return Difference("truncated" if end and not goes_on else "altered", *shown)


def _notes(parser: PromptParser, prompt: PromptLike, real: Segmentation, whole: str) -> Iterable[str]:
    if real.fallback is not None:
        yield f"the whole prompt is computed in full: {real.fallback}"
    elif parser.lacks_template(prompt):
        yield NO_TEMPLATE
    elif not isinstance(prompt, str | Prompt):
        yield f"the chat template makes {len(whole)} characters of the messages, contents unaltered"
    yield from real.notes


# -- what was measured -------------------------------------------------------------------------------


def measured_policies(
    budgets: Budgets, auto: AutoPolicies, checked: Callable[[str | None], str], namespace: str | None
) -> tuple[Sequence[MeasuredPolicy], str]:
    """The points of a calibration, or of the check of ``auto``, and the name of their loss; for plots."""
    namespace = checked(namespace)
    record, tuned = budgets.record(namespace), auto.record(namespace)
    if record is not None:
        points = [MeasuredPolicy(p.policy, p.ratio, p.loss) for p in record.curve]
        return points, f"{record.quality}, on {record.encoder}"
    if tuned is not None:
        rows = [MeasuredPolicy(f"{r.policy} on {r.encoder}", r.ratio, r.kl) for r in tuned.rows]
        return rows, "KL to full, nats per token"
    raise ValueError(
        f"nothing was measured for namespace {namespace!r}: call rag.tune(), or run ragcachekit calibrate"
    )
