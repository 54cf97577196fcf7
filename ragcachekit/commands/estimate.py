"""``ragcachekit estimate``: the share of prompt tokens and searches that a log's questions would save.

Only the tokenizer is loaded: the log is replayed over the ids of the chunks that its prompts use.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal as size

from ragcachekit.commands import options as opt
from ragcachekit.commands.ask import CorpusSearch
from ragcachekit.commands.console import note, pairs, quiet_loading, show, written
from ragcachekit.commands.grades import ESTIMATE, only_beginnings, why_prefix
from ragcachekit.commands.workspace import OwnFiles, load_tokenizer
from ragcachekit.types import DEFAULT_ENCODER, parse_encoder

if TYPE_CHECKING:
    from ragcachekit.commands.corpus import Corpus
    from ragcachekit.commands.questions import Question
    from ragcachekit.commands.report import BenchReport

RECOMPUTED = 0.1  # of the stored rows, at most, by the default policy
PRECOMPUTED = 1 + parse_encoder(DEFAULT_ENCODER)[1]  # forwards over every chunk of the corpus
MIN_SHARE = 0.1  # of the prompt tokens that must come from the cache for it to be worth its memory
SHARES = (0.1, 0.25, 0.5, 1.0)  # sizes of the cache that are replayed, of the KV that the log uses
SUMMARY, SIZES = "summary", "sizes"  # parts of the report

_CHUNK_NAME = re.compile(r"\S+#\d+")


def estimate(
    log: Annotated[
        Path,
        typer.Option(
            callback=opt.check_file,
            help='Questions, one per line: plain, or {"question": ..., "chunks": [...]}; '
            "chunks are texts or file#number, what your retriever returned.",
        ),
    ],
    corpus: opt.CorpusDir,
    model: opt.Model = "",
    k: opt.K = 4,
    tolerance: opt.Tolerance = 0.0,
    cache: opt.CacheDir = None,
    chunk_tokens: opt.ChunkTokens = 200,
    json: opt.Json = None,
) -> None:
    """Will it save time? The share of your log's prompt tokens and searches that a cache would serve.

    The questions of --log are replayed in order over the documents of --corpus. No model runs; only the
    tokenizer of --model is loaded.
    """
    quiet_loading()
    from ragcachekit.commands.questions import read_questions

    report = run(opt.settings_of(OwnFiles, locals()), read_questions(log, ["question"]))
    found = report.part(SUMMARY).rows[0]
    foreign = found["chunks_not_in_corpus"]
    rows = {
        "questions": f"{found['questions']}; the query cache saves {found['searches_saved']:.0%} of the "
        "searches",
        "prompts": f"{found['prompt_tokens']:.0f} tokens (median); {found['chunk_token_share']:.0%} of "
        "all tokens are chunks, the rest is computed every time",
        "chunks": f"{found['chunk_uses']} uses of {found['chunks_used']} different ones; the corpus has "
        f"{found['chunks_in_corpus']}" + (f", {foreign} of those used not among them" if foreign else ""),
        "KV": f"{size(found['kv_bytes_used'])} of the chunks that the log uses",
    }
    since = found["break_even"]
    fewer = "never fewer" if since is None else f"fewer from question {since} on"
    rows["prefill"] = f"{found['cost']:.0%} of the rows without a cache, over the whole log; {fewer}"
    if "precompute_tokens" in found:
        rows["precompute"] = (
            f"computes {found['precompute_tokens']} tokens, as many as {found['precompute_questions']} such "
            "questions save"
        )
    show(pairs(rows))
    show(report.part(SIZES).table("Prompt tokens from the cache, by its size (least recently used go first)"))
    typer.echo(found["verdict"])
    written(report, json)


def run(settings: OwnFiles, log: Sequence[Question]) -> BenchReport:
    """Replay a log; a row of the part ``summary``, and one per size of the cache.

    ``tokens_found`` is the share of all prompt tokens that come from a cache of that size, filled by the log
    alone; ``after_precompute`` the same where the corpus was encoded ahead, onto a disk. Raises ValueError
    for a chunk that the corpus lacks; CorpusError, RetrievalError; RagCacheError for a model of grade prefix.
    """
    from ragcachekit.commands.questions import SEPARATOR, PromptMaker, bare_ids
    from ragcachekit.commands.report import BenchReport

    if why := why_prefix(settings.model):
        raise only_beginnings(ESTIMATE, why)
    tokenizer, corpus = load_tokenizer(settings.model), settings.read_corpus()
    for skipped in corpus.notes:
        note(skipped)
    maker, token_bytes = PromptMaker(tokenizer), kv_bytes_per_token(settings.model)
    sizes, prompts, tokens, saved = dict[str, int](), list[list[str]](), list[int](), 0
    for question, texts, hit in retrieved(settings, log, corpus):
        for text in texts:
            if text not in sizes:
                sizes[text] = len(tokenizer(text, add_special_tokens=False).input_ids)
        prompts.append(list(dict.fromkeys(texts)))
        tokens.append(len(bare_ids(tokenizer, maker.filled(SEPARATOR.join(texts), question))))
        saved += hit
    known, total = set(corpus.texts), sum(tokens)
    used = sum(sizes.values())
    least = max(sum(sizes[text] for text in texts) for texts in prompts)  # of the largest prompt
    rows: list[dict[str, Any]] = [
        {
            "part": SIZES,
            "cache_mb": room * token_bytes / 1e6,
            "share_of_used": room / used,
            "tokens_found": replay(prompts, sizes, room) / total,
            "after_precompute": replay(prompts, sizes, room, known) / total,
        }
        for room in (max(round(share * used), least) for share in SHARES)
    ]
    found, ahead = rows[-1]["tokens_found"], rows[-1]["after_precompute"]
    ids = tokenizer(corpus.texts, add_special_tokens=False, verbose=False).input_ids
    ahead_tokens = PRECOMPUTED * sum(map(len, ids))
    questions = math.ceil(ahead_tokens * len(log) / ((1 - RECOMPUTED) * ahead * total)) if ahead else 0
    shares = balance(prompts, sizes, tokens, RECOMPUTED)
    summary: dict[str, Any] = {
        "part": SUMMARY,
        "questions": len(log),
        "searches_saved": saved / len(log),
        "prompt_tokens": statistics.median(tokens),
        "chunk_token_share": sum(sizes[text] for texts in prompts for text in texts) / total,
        "chunk_uses": sum(map(len, prompts)),
        "chunks_used": len(sizes),
        "chunks_not_in_corpus": len(sizes.keys() - known),
        "chunks_in_corpus": len(known),
        "kv_bytes_used": used * token_bytes,
        "helps": max(found, ahead) >= MIN_SHARE,
        "verdict": _verdict(found, ahead, questions),
        "cost": shares[-1],
        "break_even": break_even(shares),
    }
    if questions:
        summary |= {"precompute_tokens": ahead_tokens, "precompute_questions": questions}
    return BenchReport("estimate", settings.model, 0, (summary, *rows))


def retrieved(
    settings: OwnFiles, log: Sequence[Question], corpus: Corpus
) -> Iterator[tuple[str, Sequence[str], bool]]:
    """Each question, its chunks' texts, and whether the query cache saves its search."""
    named = {f"{chunk.source}#{chunk.number}": chunk.text for chunk in corpus.chunks}
    # Nothing is embedded where every line names its chunks and only equal questions are hits.
    search = None
    if settings.tolerance or not all(query.chunks for query in log):
        search = CorpusSearch(settings, corpus)
    asked = set[str]()
    for query in log:
        found = None if search is None else search(query.question)
        hit = query.question in asked if found is None else found.hit
        asked.add(query.question)
        if not query.chunks and found is not None:
            yield query.question, [chunk.text for chunk in found.documents], hit
            continue
        for name in query.chunks:
            if name not in named and _CHUNK_NAME.fullmatch(name):
                raise ValueError(
                    f"the corpus has no chunk {name} of the question {query.question!r}; numbers count a "
                    "file's chunks from 0, as `ask` names its sources, and depend on --chunk-tokens"
                )
        yield query.question, [named.get(name, name) for name in query.chunks], hit


def replay(
    prompts: Sequence[Sequence[str]], tokens: Mapping[str, int], room: int, ahead: Collection[str] = ()
) -> int:
    """Tokens found in a least-recently-used cache of that ``room``, or among those encoded ``ahead``."""
    held: OrderedDict[str, None] = OrderedDict()
    total = found = 0
    for texts in prompts:
        found += sum(tokens[text] for text in texts if text in held or text in ahead)
        for text in texts:
            total += 0 if text in held else tokens[text]
            held[text] = held.pop(text, None)
        while total > room:
            total -= tokens[held.popitem(last=False)[0]]
    return found


def balance(
    prompts: Sequence[Sequence[str]], tokens: Mapping[str, int], prompt_tokens: Sequence[int], share: float
) -> list[float]:
    """Rows computed after each question, as a share of those without a cache, all until then together.

    As prompts are planned under ``average:n``: what is not stored is computed and kept, and a ``share`` of
    stored rows. A chunk has a mean of two contexts in the end, and an entry for prompts that it begins: what
    it lacks is computed after an answer, at every third use without it.
    """
    from ragcachekit.engine.components import EngineSettings
    from ragcachekit.plan.link_plan import CONTEXTS_TO_OBSERVE

    known, lacked = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()
    spent, out = 0.0, list[float]()
    for number, texts in enumerate(prompts):
        uses = [(text, place == 0) for place, text in enumerate(texts)]
        held = [use for use in uses if known[use[0], True] or known[use[0], False]]
        lacked.update(few := [use for use in held if known[use] < (1 if use[1] else CONTEXTS_TO_OBSERVE)])
        due = [use for use in few if lacked[use] % (EngineSettings.encode_after + 1) == 0]
        known.update([*due, *(use for use in uses if use not in held)])
        spent += prompt_tokens[number] + sum(tokens[text] for text, _ in due)
        spent -= (1 - share) * sum(tokens[text] for text, _ in held)
        out.append(spent / sum(prompt_tokens[: number + 1]))
    return out


def break_even(shares: Sequence[float]) -> int | None:
    """The question from which on fewer rows were computed than without a cache; None if that is never so."""
    dearer = [number for number, share in enumerate(shares, 1) if share >= 1]
    after = max(dearer, default=0) + 1
    return after if after <= len(shares) else None


def kv_bytes_per_token(model: str) -> int:
    """Bytes of one token's KV over all layers, of the model without its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ragcachekit.model.kv import KVLayout
    from ragcachekit.model.loading import resolve_model

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(resolve_model(model))
        return KVLayout.of(AutoModelForCausalLM.from_config(config)).token_bytes


def _verdict(found: float, ahead: float, questions: int) -> str:
    shares = f"{found:.0%} of the prompt tokens would come from the cache, {ahead:.0%} after precompute"
    if max(found, ahead) < MIN_SHARE:
        return f"it will not help you: {shares}"
    if found < MIN_SHARE:
        return (
            f"it saves time only if you run precompute first, and then from question {questions} on: {shares}"
        )
    return f"it will save you time: {shares}; what answers lose by it: ragcachekit calibrate"
