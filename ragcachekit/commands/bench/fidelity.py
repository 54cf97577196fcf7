"""Fidelity bench: what reuse does to answers, for every policy and encoder, beside a full prefill."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

import ragcachekit
from ragcachekit.commands.bench.fidelity_rows import ALONE, BASELINES, Measurement, quality_rows
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.datasets import Question, digest
from ragcachekit.commands.engines import FULL, Engines, needs_neighbours, quantisation
from ragcachekit.commands.questions import (
    ASK,
    EMBEDDING,
    STYLES,
    AskSettings,
    PromptMaker,
    QuestionPrompt,
    Sample,
)
from ragcachekit.commands.workspace import load_checked
from ragcachekit.errors import PromptTooLong, RagCacheError
from ragcachekit.model.identity.fingerprint import fingerprint
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.plan.encodings import IN_PROMPT, Encodings
from ragcachekit.policies.measured import PolicyAndEncoder
from ragcachekit.policies.registry import open_policy
from ragcachekit.quality.compare import Reference, exact_match, word_f1
from ragcachekit.reports import Answer
from ragcachekit.types import Ids

POLICIES = (
    *("reuse", "lego0", "lego:4", "lego:16"),
    *(f"{kind}:0.15" for kind in ("random", "heavy", "query", "cacheblend", "cacheblend-gradual")),
    *(f"{kind}:{r}" for kind in ("deep", "impact") for r in (0.05, 0.1, 0.15, 0.3)),
    *("craft:0.1", "craft:0.3", "craft-focused:0.6"),  # over standalone half of it is spent
)
_FORMAT = 5


@dataclass(frozen=True)
class FidelitySettings(AskSettings):
    """What is measured: every policy over every encoder.

    A policy that insists on an encoder gets that one only. ``full``, and ``reuse`` over ``system``, are
    always added, and with a dataset ``reuse`` over ``standalone``. ``prompt`` is a style of
    :class:`.PromptMaker`.
    """

    encoders: tuple[str, ...] = ("standalone",)
    neighbours: str = EMBEDDING
    prompt: str = ASK
    probes: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.policies:
            open_policy(name)
        if not self.encoders:
            raise ValueError("give at least one encoder, for example standalone")
        if self.prompt not in STYLES:
            raise ValueError(f"unknown prompt {self.prompt!r}; known: {', '.join(STYLES)}")


def run(
    settings: FidelitySettings,
    sample: Sample | None = None,
    *,
    work: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> BenchReport:
    """Ask a ``sample``, by default that of the settings, with every policy over every encoder.

    ``work`` is a file with the results so far, from which an interrupted run continues.

    Returns
    -------
    BenchReport
        ``quality`` rows: means per policy, encoder and question type with ``<metric>_low`` and
        ``<metric>_high``, of ``f1`` just ``low`` and ``high`` (95 %, bootstrap over questions). One ``check``
        row: ``full`` against the model's own generate.

    Raises ValueError, CorpusError for bad settings or questions, and PromptTooLong, before any work;
    RagCacheError if a model or a prompt cannot be used, or ``full`` differs from the model's own generate.
    """
    if sample is None:
        sample = settings.sample(needs_neighbours=any(map(needs_neighbours, settings.encoders)))
    model, tokenizer = load_checked(settings.model, settings.device, settings.dtype)
    ways, maker = _ways(settings, model, tokenizer), PromptMaker(tokenizer, settings.prompt)
    prompts, limit = [maker.prompt(question) for question in sample.questions], settings.max_new_tokens
    context = model.config.get_text_config().max_position_embeddings
    longest, asked = max(
        (len(p.token_ids), q.question) for p, q in zip(prompts, sample.questions, strict=True)
    )
    if longest + limit > context:
        raise PromptTooLong(
            f"the prompt of {asked!r} has {longest} tokens; with {limit} for the answer that is more than "
            f"the model's context ({context})"
        )
    header = {
        "model": fingerprint(model, tokenizer, cache=settings.folder / "digests.json").digest,
        "seed": settings.seed,
        "questions": digest(sample.questions),
        "max_new_tokens": limit,
        "neighbours": settings.neighbours,
        "prompt": settings.prompt,
        "version": ragcachekit.__version__,
    }
    with ExitStack() as opened:
        done = opened.enter_context(closing(Work(header, work)))
        left = [i for i in range(len(prompts)) if (i, FULL) not in done.results]
        numbers = tqdm(left, desc="generate", unit="question", disable=not progress or not left)
        # Before the library touches the model.
        own = {i: _generated(model, prompts[i].token_ids, limit, maker.pad) for i in numbers}
        encoders = dict.fromkeys(way.encoder for way in ways if way != FULL)
        near = any(map(needs_neighbours, encoders))
        engines = Engines(
            model,
            tokenizer,
            encoders,
            neighbours=sample.neighbours(settings.neighbours, progress) if near else None,
            stop=maker.stop,
            max_new_tokens=limit,
            cache_dir=settings.cache_dir,
        )
        opened.callback(engines.close)
        with tqdm(total=len(prompts) * len(ways), unit="answer", disable=not progress) as bar:
            for number, (question, prompt) in enumerate(zip(sample.questions, prompts, strict=True)):
                todo = [way for way in ways if (number, way) not in done.results]
                bar.update(len(ways) - len(todo))
                if number in own and engines.answer(prompt, FULL, whole=True).token_ids != own[number]:
                    raise RagCacheError(
                        "full through the library differs from the model's own generate on the question "
                        f"{question.question!r}; do not trust any figure"
                    )
                if todo:
                    right, reference = engines.full(prompt, maker.answer_ids(question.answers[0]))
                for way in todo:
                    done.put(number, way, _measured(engines, question, prompt, way, right, reference))
                    bar.update()
    results = {way: [done.results[i, way] for i in range(len(prompts))] for way in ways}
    rows = quality_rows(sample.questions, results, settings.seed)
    name = "full equals the model's own generate"
    rows.append({"part": "check", "name": name, "n": len(prompts), "mismatches": 0})
    return BenchReport("fidelity", settings.model, settings.seed, tuple(rows))


def _measured(
    engines: Engines,
    question: Question,
    prompt: QuestionPrompt,
    way: PolicyAndEncoder,
    right: Answer,
    reference: Reference,
) -> Measurement:
    compared, link = engines.compare(question, prompt, way, reference)
    answer = right if way == FULL else engines.answer(prompt, way)
    text = answer.text.strip()
    return Measurement(
        text=text,
        exact_match=max(exact_match(text, one) for one in question.answers),
        f1=max(word_f1(text, one) for one in question.answers),
        agreement=float(text == right.text.strip()),
        answer_tokens=len(answer.token_ids),
        kl=compared.first_kl,
        answer_kl=compared.kl,
        answer_loss=compared.losses[0],
        gold_loss=compared.losses[1],
        # By definition full recomputes all that could be cached.
        ratio_spent=1.0 if way == FULL else link.recompute_ratio,
        prompt_tokens=link.prompt_tokens,
        recomputed_tokens=link.recomputed_tokens,
        reused_tokens=link.reused_tokens,
    )


class Work:
    """Results by question and way, also written to a file if there is one.

    ``header`` holds what must be the same for results to go together. A last line that was cut off is
    dropped. Raises RagCacheError if the file belongs to another run or is no work file.
    """

    def __init__(self, header: Mapping[str, Any], path: str | os.PathLike[str] | None = None) -> None:
        self.results: dict[tuple[int, PolicyAndEncoder], Measurement] = {}
        self._file = None
        if path is not None:
            place = Path(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            self._read({"fidelity": _FORMAT, **header}, place)
            self._file = place.open("a", encoding="utf-8")

    def put(self, question: int, way: PolicyAndEncoder, found: Measurement) -> None:
        """Add a result."""
        self.results[question, way] = found
        if self._file is not None:
            line = {"question": question, **way._asdict(), "result": asdict(found)}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _read(self, header: dict[str, Any], path: Path) -> None:
        raw = path.read_bytes() if path.exists() else b""
        whole, _, cut = raw.rpartition(b"\n")
        if not raw.startswith(b'{"fidelity"'[: len(raw)]):
            raise RagCacheError(f"{path} is no work file of this bench; give another one")
        first, *lines = whole.decode("utf-8", errors="replace").splitlines() or [json.dumps(header)]
        try:
            found = json.loads(first)
            if other := [name for name, value in header.items() if found.get(name) != value]:
                raise RagCacheError(
                    f"{path} is of a run with another {' and '.join(other)}; delete it or give another file"
                )
            for entry in map(json.loads, lines):
                way = PolicyAndEncoder(entry["policy"], entry["encoder"])
                self.results[entry["question"], way] = Measurement(**entry["result"])
        except (ValueError, KeyError, TypeError) as error:
            raise RagCacheError(f"{path} is damaged; delete it and start again") from error
        if cut or not whole:
            path.write_text("".join(line + "\n" for line in (first, *lines)), encoding="utf-8")


def _ways(settings: FidelitySettings, model: Any, tokenizer: Any) -> list[PolicyAndEncoder]:
    """The baselines, then every policy over every encoder, once each."""
    baselines = BASELINES if settings.dataset is None else (*BASELINES, ALONE)
    rope, out = describe_rope(model), dict.fromkeys(baselines)
    for name in settings.policies or POLICIES:
        policy = open_policy(name)
        if not policy.reads_cache:
            continue
        for encoder in (policy.encoder,) if policy.encoder else settings.encoders:
            if encoder == IN_PROMPT:
                raise ValueError(
                    "chunks are encoded in-prompt by earlier prompts, and asking a question would encode its "
                    "own context for the next policy"
                )
            plain, rounded = encoder.partition("+")[0], quantisation(encoder)
            found = Encodings(plain, rope, tokenizer.bos_token_id).name
            out[PolicyAndEncoder(policy.name, f"{found}+{rounded}" if rounded else found)] = None
    return list(out)


@torch.no_grad()
def _generated(model: Any, token_ids: Ids, max_new_tokens: int, pad: int) -> Ids:
    """Greedy tokens of the model's own ``generate``."""
    ids = torch.tensor([token_ids], device=model.device)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": pad}
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    return tuple(output[0, ids.shape[1] :].tolist())
