"""The short demo: the same questions to the bare model and through the library, one of them live."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.demo import corpus, tour_report
from benchmarks.demo.answers import PART
from benchmarks.demo.chain import Watch, build_chain, messages
from benchmarks.demo.corpus import Corpus, Settings
from benchmarks.demo.recording import write_recording
from benchmarks.demo.run import found_places, query_figures
from benchmarks.demo.side_by_side import SideBySide
from benchmarks.demo.tour_report import Compared
from langchain_ragcachekit import ChatRagCache, RagCacheRetriever
from ragcachekit.commands.console import show
from ragcachekit.commands.questions import bare_ids
from ragcachekit.commands.report import BenchReport
from ragcachekit.commands.ttft import ONE_TOKEN
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.model.loading import resolve_model
from ragcachekit.quality.compare import Continuation

MODULES = ("heapq", "colorsys", "fnmatch", "glob", "getpass", "textwrap")
"""Short documentation that answers seven of the questions: encoding more would take most of the demo."""

RECORDING = "demo.svg"

TOUR = Settings(questions=7, timed=1, chunks=None, wordpieces=256, vectors=0, k=8, modules=MODULES)
"""``timed``: times that each prompt is repeated after its answer; ``vectors``: the passages alone."""

Shown = Callable[[str], None]


def run(settings: Settings, out: Path, *, progress: bool = True) -> BenchReport:
    """Run the demo, print what it finds, and write ``demo.json``, ``demo.png`` and ``demo.svg`` to ``out``.

    Raises RagCacheError if the documentation answers none of the questions, or a prompt was not served from
    the cache; OSError if ``out`` cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    start, folder = time.monotonic(), Path(resolve_model(settings.model))
    read = corpus.read(settings, progress)
    if not read.asked:
        raise RagCacheError("the documentation of this Python answers none of the questions; use another one")
    show(
        f"[bold]SmolLM2-135M-Instruct[/] answers {len(read.asked)} questions from {len(read.texts)} passages "
        f"of Python's documentation, {settings.k} in each prompt"
    )
    bare = Bare(folder, settings.max_tokens)
    with RagCache.from_pretrained(folder) as rag:
        queries, retriever = query_figures(read, rag, progress)
        found = _compare(settings, read, rag, retriever, bare, out, progress)
    rows = [*({"part": PART, **asdict(one)} for one in found), *queries]
    report = BenchReport("demo", settings.model, settings.seed, tuple(rows))
    report.write_json(out / tour_report.RESULTS)
    tour_report.figures(found, queries[0])
    tour_report.draw(found, out / tour_report.PICTURE)
    show(
        f"Wrote {tour_report.RESULTS}, {tour_report.PICTURE} and {RECORDING} to {out}; "
        f"{time.monotonic() - start:.0f} s. More: make demo FULL=1"
    )
    return report


class Bare:
    """A copy of the model that the library never touches, asked as its users do without the library."""

    def __init__(self, folder: Path, max_tokens: int) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
        self._options: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": False}

    @torch.no_grad()
    def answer(
        self, tokenizer: Any, prompt: list[dict[str, Any]], shown: Shown | None = None
    ) -> tuple[str, list[int], float]:
        """The answer, its tokens and milliseconds to the first; ``shown`` gets the answer as it grows."""
        started = time.perf_counter()
        ids = torch.tensor([bare_ids(tokenizer, prompt)])
        stream = _Stream(tokenizer, shown)
        self._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), streamer=stream, **self._options
        )
        assert stream.first is not None
        assert stream.ids is not None
        return stream.text, stream.ids, (stream.first - started) * 1e3


class _Stream(BaseStreamer):  # type: ignore[misc]
    """Decodes what ``generate`` hands on; ``first`` is when the first token came."""

    def __init__(self, tokenizer: Any, shown: Shown | None) -> None:
        self._tokenizer, self._shown = tokenizer, shown
        self.ids: list[int] | None = None
        self.first: float | None = None
        self.text = ""

    def put(self, value: Any) -> None:
        """Take the prompt first, then token after token."""
        if self.ids is None:
            self.ids = []
            return
        self.first = self.first or time.perf_counter()
        self.ids += value.reshape(-1).tolist()
        self.text = str(self._tokenizer.decode(self.ids, skip_special_tokens=True))
        if self._shown is not None:
            self._shown(self.text)

    def end(self) -> None:
        """All was handed on."""


def _compare(
    settings: Settings,
    read: Corpus,
    rag: RagCache,
    retriever: RagCacheRetriever,
    bare: Bare,
    folder: Path,
    progress: bool,
) -> list[Compared]:
    """Encode what the questions find ahead; then compare, the first question live and recorded."""
    found = [[read.texts[place] for place in found_places(retriever, question)] for question in read.asked]
    prompts = [messages(texts, question.text) for texts, question in zip(found, read.asked, strict=True)]
    passages, started = list(dict.fromkeys(text for texts in found for text in texts)), time.monotonic()
    rag.encode(passages, prompt=prompts[0], progress=progress)
    show(f"Encoded the {len(passages)} passages that they find, once, in {time.monotonic() - started:.0f} s")
    chain = build_chain(retriever, ChatRagCache(rag=rag, max_tokens=settings.max_tokens))
    rag.generate(prompts[-1], **ONE_TOKEN)  # the first of a process takes longer, with and without the cache
    bare.answer(rag.tokenizer, [{"role": "user", "content": "Hello"}])
    out: list[Compared] = []
    pairs = tqdm([*zip(read.asked, prompts, strict=True)], "both", unit="prompt", disable=not progress)
    for question, prompt in pairs:
        with SideBySide(question.text, live=progress and not out) as sides:
            plain, tokens, bare_ms = bare.answer(rag.tokenizer, prompt, sides.left)
            sides.begin_right()
            watch, cached = Watch(), ""
            for piece in chain.stream(question.text, {"callbacks": [watch]}):
                cached += piece
                sides.right(cached)
        if not out:
            write_recording(sides, folder / RECORDING)
        rag.flush()
        warm = [rag.generate(prompt, **ONE_TOKEN).report for _ in range(settings.timed)]
        link = warm[0].link
        if 2 * link.reused_tokens < link.prompt_tokens:
            raise RagCacheError(f"a prompt was not served from the cache: {link}")
        # After the same beginning of the answer, as one other token makes all that follow differ.
        after = Continuation(rag.model, rag.link(prompt).inputs).log_probs(tokens[:-1]).argmax(-1)
        out.append(
            Compared(
                question=question.text,
                known=question.answer,
                bare=plain.strip(),
                cached=cached.strip(),
                tokens=len(tokens),
                agreed=int((after == torch.tensor(tokens)).sum()),
                bare_ms=bare_ms,
                cached_ms=(watch.report["ttft_ms"], *(report.ttft_ms for report in warm)),
                prompt_tokens=link.prompt_tokens,
                reused=link.reused_tokens,
                recomputed=link.recomputed_tokens,
                policy=link.policy,
            )
        )
    return out
