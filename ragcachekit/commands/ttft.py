"""Measured times to the first token: ordinary prefill against linked chunk KV, in one run."""

from __future__ import annotations

import copy
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from tqdm.auto import tqdm

from ragcachekit.commands.console import note
from ragcachekit.commands.corpus import read_corpus
from ragcachekit.commands.grades import loaded_grade
from ragcachekit.commands.options import COLD_DISK, names, numbers
from ragcachekit.commands.report import BenchReport
from ragcachekit.commands.workspace import load_checked
from ragcachekit.config import TreeConfig
from ragcachekit.engine.grade import tolerance_for
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import CorpusError, RagCacheError
from ragcachekit.model.snapshots import PAST
from ragcachekit.model.snapshots import run as run_model
from ragcachekit.policies.registry import open_policy
from ragcachekit.prefix_tree.knowledge_tree import open_tree
from ragcachekit.store.base import KVStore
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.memory import GpuStore, HostStore
from ragcachekit.store.tiered import TieredStore
from ragcachekit.types import DEFAULT_ENCODER, DEFAULT_POLICY, Chunk, Prompt, Text

NO_TIER = "none"
SYSTEM_TOKENS = 24
SYSTEM = "Answer the question from the documents below.\n\n"
QUESTION = "\n\nQuestion: What do these documents say, and what do they leave open?\nAnswer:"
ONE_TOKEN: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False}
_EVERYTHING = f"lego:{1 << 30}"  # through the linked path, at ratio 1.0
_BYTES = 32 << 30  # nothing that is measured may be evicted


@dataclass(frozen=True, kw_only=True)
class TtftSettings:
    """What is measured.

    ``corpus`` is a folder of documents for the prompts, whose question is then fixed; default: random tokens.
    Of ``tiers``, ``disk`` is read through the system's page cache; ``disk-cold`` drops the files from it
    before each request. ValueError for prompts too short for a chunk.
    """

    model: str
    corpus: str | os.PathLike[str] | None = None
    prompt_tokens: Sequence[int] = (2048,)
    chunk_tokens: int = 490
    question_tokens: int = 64
    policies: Sequence[str] = ("full", DEFAULT_POLICY, "reuse")
    encoder: str | None = None
    dtypes: Sequence[str] = ("float32",)
    runs: int = 5
    device: str | None = "cpu"
    tiers: Sequence[str] = ("host",)
    seed: int = 0

    def __post_init__(self) -> None:
        least = SYSTEM_TOKENS + self.question_tokens + 1
        if self.corpus is None and (small := [size for size in self.prompt_tokens if size < least]):
            raise ValueError(
                f"a prompt of {small[0]} tokens has no room for a chunk; ask for {least} or more"
            )

    def load(self, dtype: str) -> tuple[Any, Any]:
        return load_checked(self.model, self.device, dtype)

    def prompt(self, lm: Any, tokenizer: Any, tokens: int) -> Prompt:
        if self.corpus is not None:
            return corpus_prompt(self.corpus, tokenizer, tokens, self.chunk_tokens, self.seed)
        vocab = lm.config.get_text_config().vocab_size
        return random_prompt(vocab, tokens, self.chunk_tokens, self.question_tokens, self.seed)


def lists(prompt_tokens: str, policies: str, tiers: str, dtype: str) -> dict[str, Any]:
    """Fields of the settings that the commands take with commas between."""
    return {
        "prompt_tokens": [int(count) for count in numbers("--prompt-tokens", prompt_tokens)],
        "policies": names(policies),
        "tiers": names(tiers),
        "dtypes": names(dtype),
    }


def random_prompt(
    vocab: int, prompt_tokens: int, chunk_tokens: int, question_tokens: int, seed: int
) -> Prompt:
    """A short system text, equal chunks of about ``chunk_tokens``, a question: random ids, sizes exact."""
    ids = torch.randint(vocab, (prompt_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    stop = prompt_tokens - question_tokens
    return _prompt(ids[:SYSTEM_TOKENS], ids[SYSTEM_TOKENS:stop], ids[stop:], chunk_tokens)


def corpus_prompt(
    folder: str | os.PathLike[str], tokenizer: Any, prompt_tokens: int, chunk_tokens: int, seed: int
) -> Prompt:
    """As :func:`random_prompt`, of :data:`SYSTEM`, adjacent text of the folder's documents and a question.

    Where the text begins is drawn. CorpusError if the folder has too little text.
    """
    system, question = (tokenizer(text, add_special_tokens=False).input_ids for text in (SYSTEM, QUESTION))
    size = prompt_tokens - len(system) - len(question)
    text = "\n\n".join(read_corpus(folder, chunk_tokens=1 << 30).texts)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    if len(ids) < size:
        raise CorpusError(f"{os.fspath(folder)} has {len(ids)} tokens of text, and the prompt needs {size}")
    draw = torch.Generator().manual_seed(seed)
    start = int(torch.randint(len(ids) - max(size, 0) + 1, (1,), generator=draw))
    return _prompt(system, ids[start : start + max(size, 0)], question, chunk_tokens)


def _prompt(
    system: Sequence[int], documents: Sequence[int], question: Sequence[int], chunk_tokens: int
) -> Prompt:
    if min(len(documents), len(question), chunk_tokens) < 1:
        raise ValueError(
            "the prompt has no room for a system text, a chunk and a question; ask for more tokens"
        )
    count = max(1, round(len(documents) / chunk_tokens))
    sizes = [len(documents) // count + (i < len(documents) % count) for i in range(count)]
    ends = [0, *itertools.accumulate(sizes)]
    chunks = [Chunk(token_ids=tuple(documents[a:b])) for a, b in itertools.pairwise(ends)]
    return Prompt([Text(token_ids=tuple(system)), *chunks, Text(token_ids=tuple(question))])


class Sample(NamedTuple):
    """One request: times in ms, and recomputed / cached rows."""

    ttft_ms: float
    recompute_ratio: float
    prompt_tokens: int


@dataclass
class Timings:
    """One row of the table: how it ``ask``\\ s, and the samples so far, one per round."""

    policy: str
    tier: str
    ask: Callable[[], Sample]
    samples: list[Sample] = field(default_factory=list)

    def row(self, full_ms: float) -> dict[str, Any]:
        """The flat row; ``full_ms`` is the median of ``full`` in the same run."""
        medians = Sample(*map(statistics.median, zip(*self.samples, strict=True)))
        times = [sample.ttft_ms for sample in self.samples]
        return {
            "tier": self.tier,
            "prompt_tokens": round(medians.prompt_tokens),
            "recompute_ratio": medians.recompute_ratio,
            "ttft_ms": medians.ttft_ms,
            "ttft_ms_min": min(times),
            "ttft_ms_max": max(times),
            "speedup": full_ms / medians.ttft_ms,
            "runs": len(times),
        }


class TierEngines(NamedTuple):
    """Engines around one model.

    Each of ``warm``, by tier, reads that tier alone and stores nothing; ``cold`` has a host tier that stays
    empty. ``folder`` holds the disk tier.
    """

    warm: dict[str, RagCache]
    cold: RagCache
    folder: Path


def run(settings: TtftSettings, progress: bool = False) -> BenchReport:
    """Measure TTFT of prompts of system text, chunks and question, per dtype and prompt size.

    Every round asks once in every way, so that a drifting machine hits all alike. The policies come after
    ``full`` (what ``speedup`` is over), ``cold`` (nothing cached), ``generate`` (the model's own) and
    ``prefix-cache``: generate over a transformers cache of all but the question, its copy not counted.

    Where the grade is ``prefix``, the one policy is ``prefix``: the tiers hold the beginning up to the
    question, and every request has another question.

    ``ttft_ms`` is the median of the runs. Raises ValueError for sizes that do not fit together; RagCacheError
    if the library's answer is not the model's own: no figure is given then.
    """
    found: list[dict[str, Any]] = []
    rounds = len(settings.dtypes) * len(settings.prompt_tokens) * (settings.runs + 1)
    with tqdm(total=rounds, disable=not progress, desc="ttft", unit="round") as bar:
        for dtype in settings.dtypes:
            lm, tokenizer = settings.load(dtype)
            grade = loaded_grade(lm, tokenizer, None)
            if grade.name == "prefix":
                if grade.layout is None:
                    raise RagCacheError(f"nothing is reused on this model: {grade.why}")
                note(f"policies full and prefix: this model's grade is prefix ({grade.why})")
                settings = replace(settings, policies=("prefix",), encoder=None)
            for tokens in settings.prompt_tokens:
                prompt = settings.prompt(lm, tokenizer, tokens)
                timings = _measure(lm, prompt, settings, grade.name == "prefix", bar)
                full = next(t for t in timings if t.policy == "full")
                full_ms = statistics.median(sample.ttft_ms for sample in full.samples)
                for t in timings:
                    reads_chunks = t.tier != NO_TIER and grade.name == "linked"
                    encoder = open_policy(t.policy).encoder if reads_chunks else "none"
                    named = {"policy": t.policy, "encoder": encoder or settings.encoder or DEFAULT_ENCODER}
                    found.append({"dtype": dtype, **named, **t.row(full_ms)})
    return BenchReport("ttft", ", ".join([settings.model, *settings.dtypes]), settings.seed, tuple(found))


@contextmanager
def open_engines(
    model: Any,
    tiers: Sequence[str],
    fill: Callable[[RagCache], object],
    encoder: str | None = None,
    *,
    is_prefix: bool = False,
) -> Iterator[TierEngines]:
    """Engines whose chunk KV lies in these tiers; a disk tier lives in a temporary folder meanwhile.

    ``fill`` makes an engine encode all that is measured, before the others open its tiers. ``is_prefix``: of
    a model of grade prefix, whose tiers hold beginnings of prompts.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragcachekit-bench-")))

        def open_tier(kind: str) -> KVStore:
            store: KVStore
            if kind == "disk":
                store = DiskStore(folder / "kv", _BYTES)
            elif kind == "gpu":
                store = GpuStore(_BYTES, model.device)
            else:
                store = HostStore(_BYTES, pinned=model.device.type == "cuda")
            stack.callback(store.close)
            return store

        def beginnings(kind: str) -> RagCache:
            sizes: dict[str, Any] = {
                f"{name}_bytes": _BYTES if name == kind else 0 for name in ("gpu", "host", "disk")
            }
            tree = open_tree(TreeConfig(**sizes), model.device, folder=folder)
            stack.callback(tree.close)
            rag = RagCache(model, policy="prefix", tree=tree, namespace="bench", cold="now")
            if kind:
                fill(stack.enter_context(rag))
            return rag

        kinds = {tier: tier.removesuffix("-cold") for tier in tiers}
        if is_prefix:
            filled = {kind: beginnings(kind) for kind in dict.fromkeys(kinds.values())}
            yield TierEngines({t: filled[kind] for t, kind in kinds.items()}, beginnings(""), folder)
            return

        def engine(store: KVStore, cold: Literal["now", "never"]) -> RagCache:
            # load="always": what is measured is loading.
            options: dict[str, Any] = {"namespace": "bench", "cold": cold, "load": "always"}
            rag = RagCache(model, policy="reuse", encoder=encoder, store=store, **options)
            return stack.enter_context(rag)

        stores = {kind: open_tier(kind) for kind in dict.fromkeys(kinds.values())}
        fill(engine(TieredStore(tuple(stores.values())), "now"))
        warm = {tier: engine(stores[kind], "never") for tier, kind in kinds.items()}
        yield TierEngines(warm, engine(open_tier("host"), "never"), folder)


def ask_engine(rag: RagCache, prompt: Prompt, policy: str, tier: str) -> Sample:
    """Time one request; RagCacheError if KV came from elsewhere than ``tier`` (``none``: from anywhere)."""
    report = rag.generate(prompt, policy=policy, **ONE_TOKEN).report
    link = report.link
    sources = {use.source for use in link.uses}
    kind = tier.removesuffix("-cold")
    served = sources == {kind if rag.grade == "linked" else f"tree:{kind}"}
    if tier == NO_TIER:
        served = not link.reused_tokens + link.recomputed_tokens
    if not served:
        raise RagCacheError(f"expected KV from {tier}, but: {link}; sources {sorted(sources)}")
    return Sample(report.ttft_ms, link.recompute_ratio, link.prompt_tokens)


def check_exact(rag: RagCache, prompt: str | Prompt) -> None:
    """Compare ``full``, and the linked path at ratio 1.0, with the model's own ``generate``.

    Raises RagCacheError if tokens or logits differ, but for rounding, or if nothing was linked.
    """
    model = rag.model
    ids = rag.link(prompt, policy="full").input_ids
    expected = _first_logits(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    token = int(expected.argmax())
    full = rag.generate(prompt, policy="full", **ONE_TOKEN).token_ids
    if full != (token,):
        raise RagCacheError(f"policy full gave the tokens {full}, model.generate gave {token}")
    linked = rag.link(prompt, policy=_EVERYTHING)
    report = linked.report
    checked = report.recomputed_tokens if rag.grade == "linked" else report.exact_tokens
    if not checked or report.approximate_tokens:
        raise RagCacheError(f"the linked path was not checked: {report}")
    allowed = tolerance_for(model.dtype) * float(expected.abs().max())
    difference = float((_first_logits(model, linked.inputs) - expected).abs().max())
    if not difference <= allowed:
        raise RagCacheError(f"at ratio 1.0 the logits differ by {difference:.2g}, allowed {allowed:.2g}")


def _first_logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """``[vocab]`` logits of the first new token, on the CPU."""
    output = model.generate(
        **inputs, **ONE_TOKEN, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    logits: torch.Tensor = output.logits[0][0].float().cpu()
    return logits


def _measure(
    lm: Any, prompt: Prompt, settings: TtftSettings, is_prefix: bool, bar: tqdm[Any]
) -> list[Timings]:
    used = [policy for policy in dict.fromkeys(settings.policies) if policy != "full"]

    def fill(rag: RagCache) -> None:
        for policy in ("reuse", *used):
            rag.generate(_turned(prompt, 1) if is_prefix else prompt, policy=policy, **ONE_TOKEN)

    with open_engines(lm, settings.tiers, fill, settings.encoder, is_prefix=is_prefix) as engines:
        check_exact(engines.warm[settings.tiers[-1]], prompt)
        bar.update()
        timings = _timings(lm, prompt, used, engines, is_prefix)
        if lm.device.type == "cuda":  # kernels are compiled at the first request
            for one in timings:
                one.ask()
        for _ in range(settings.runs):
            for one in timings:
                one.samples.append(one.ask())
            bar.update()
        return timings


def _timings(
    model: Any, prompt: Prompt, policies: Sequence[str], engines: TierEngines, is_prefix: bool
) -> list[Timings]:
    """What one round measures, in order; ``policies`` without ``full``."""
    turns = itertools.count(2)

    def of(rag: RagCache, policy: str, tier: str) -> Sample:
        for file in engines.folder.glob("**/*.safetensors") if tier == COLD_DISK else ():
            with file.open("rb") as stream:  # the next read comes from the medium
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return ask_engine(rag, _turned(prompt, next(turns)) if is_prefix else prompt, policy, tier)

    ids = [[i for segment in prompt.segments for i in segment.token_ids or ()]]
    question = len(prompt.segments[-1].token_ids or ())
    # All but the question, as transformers keeps a prompt for others; None where generate takes none.
    ran = run_model(model, torch.tensor(ids, device=model.device)[:, :-question])
    prefix = ran.cache if ran.argument == PAST else None
    uncached = policies[0] if policies else "reuse"
    return [
        Timings("generate", NO_TIER, lambda: _time_generate(model, ids)),
        *([Timings("prefix-cache", NO_TIER, lambda: _time_generate(model, ids, prefix))] if prefix else []),
        Timings("full", NO_TIER, partial(of, engines.cold, "full", NO_TIER)),
        Timings("cold", NO_TIER, partial(of, engines.cold, uncached, NO_TIER)),
        *(
            Timings(p, tier, partial(of, rag, p, tier))
            for tier, rag in engines.warm.items()
            for p in policies
        ),
    ]


def _turned(prompt: Prompt, by: int) -> Prompt:
    """The prompt with the question's tokens in another order: only what is before them is the same."""
    *before, question = prompt.segments
    ids = question.token_ids or ()
    by %= len(ids)
    return Prompt([*before, Text(token_ids=(*ids[by:], *ids[:by]))])


def _time_generate(model: Any, ids: list[list[int]], prefix: Any = None) -> Sample:
    cache = {} if prefix is None else {"past_key_values": copy.deepcopy(prefix)}
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    tensor = torch.tensor(ids, device=model.device)
    output = model.generate(
        input_ids=tensor, attention_mask=torch.ones_like(tensor), pad_token_id=0, **cache, **ONE_TOKEN
    )
    output[:, -1].tolist()  # waits for the device
    ratio = 1.0 if prefix is None else 0.0
    return Sample((time.perf_counter() - start) * 1e3, ratio, len(ids[0]))
