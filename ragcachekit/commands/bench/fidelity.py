"""Fidelity bench: what reuse does to answers, for every policy and encoder, beside a full prefill."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rouge_score import rouge_scorer
from tqdm.auto import tqdm

import ragcachekit
from ragcachekit.commands.bench.fidelity_rows import ALONE, BASELINES, Measurement, quality_rows
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.datasets import Question, digest
from ragcachekit.commands.engines import FULL, Engines, needs_neighbours, quantisation
from ragcachekit.commands.question_prompts import ASK, STYLES, PromptMaker, QuestionPrompt
from ragcachekit.commands.questions import EMBEDDING, AskSettings, Sample
from ragcachekit.commands.text_scores import exact_match, word_f1
from ragcachekit.commands.workspace import load_checked
from ragcachekit.errors import PromptTooLong, RagCacheError
from ragcachekit.model.identity.fingerprint import fingerprint
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.plan.encodings import IN_PROMPT, Encodings
from ragcachekit.policies.measured import PolicyAndEncoder
from ragcachekit.policies.registry import open_policy

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
    prompts = [maker.prompt(question) for question in sample.questions]
    _check_lengths(sample.questions, prompts, model, settings.max_new_tokens)
    header = {
        "model": fingerprint(model, tokenizer, cache=settings.folder / "digests.json").digest,
        "seed": settings.seed,
        "questions": digest(sample.questions),
        "max_new_tokens": settings.max_new_tokens,
        "neighbours": settings.neighbours,
        "prompt": settings.prompt,
        "version": ragcachekit.__version__,
    }
    with closing(Work(header, work)) as done:
        left = [i for i in range(len(prompts)) if (i, FULL) not in done.results]
        numbers = tqdm(left, desc="generate", unit="question", disable=not progress or not left)
        # Before the library touches the model.
        expected = {i: _generated(model, prompts[i], settings.max_new_tokens, maker.pad) for i in numbers}
        encoders = dict.fromkeys(way.encoder for way in ways if way != FULL)
        near = any(map(needs_neighbours, encoders))
        engines = Engines(
            model,
            tokenizer,
            encoders,
            neighbours=sample.neighbours(settings.neighbours, progress) if near else None,
            stop=maker.stop,
            max_new_tokens=settings.max_new_tokens,
            cache_dir=settings.cache_dir,
        )
        with closing(engines):
            _ask(engines, done, sample.questions, prompts, maker, ways, expected, progress)
        results = {way: [done.results[i, way] for i in range(len(prompts))] for way in ways}
    rows = quality_rows(sample.questions, results, settings.seed)
    name = "full equals the model's own generate"
    rows.append({"part": "check", "name": name, "n": len(prompts), "mismatches": 0})
    return BenchReport("fidelity", settings.model, settings.seed, tuple(rows))


def _ask(
    engines: Engines,
    done: Work,
    questions: Sequence[Question],
    prompts: Sequence[QuestionPrompt],
    maker: PromptMaker,
    ways: Sequence[PolicyAndEncoder],
    expected: Mapping[int, tuple[int, ...]],
    progress: bool,
) -> None:
    """Measure what is not done; ``expected`` are the model's own tokens by question."""
    left = {i: [w for w in ways if (i, w) not in done.results] for i in range(len(questions))}
    total = sum(map(len, left.values()))
    with tqdm(total=total, desc="fidelity", unit="answer", disable=not progress) as bar:
        for i in (number for number, ways_left in left.items() if ways_left):
            question, prompt = questions[i], prompts[i]
            if i in expected and engines.answer(prompt, FULL, whole=True).token_ids != expected[i]:
                raise RagCacheError(
                    "full through the library differs from the model's own generate on the question "
                    f"{question.question!r}; do not trust any figure"
                )
            gold = maker.answer_ids(question.answers[0])
            right, reference = engines.full(prompt, gold)
            for way in left[i]:
                compared, link = engines.compare(question, prompt, way, reference)
                answer = right if way == FULL else engines.answer(prompt, way)
                text = answer.text.strip()
                found = Measurement(
                    text=text,
                    exact_match=max(exact_match(text, one) for one in question.answers),
                    f1=max(word_f1(text, one) for one in question.answers),
                    agreement=float(text == right.text.strip()),
                    agreement_rouge_l=rouge_l(text, right.text.strip()),
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
                done.put(i, way, found)
                bar.update()


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


def rouge_l(answer: str, right: str) -> float:
    """ROUGE-L F measure without stemming; two texts without words agree."""
    tokenizer = _Words()
    if not tokenizer.tokenize(answer) and not tokenizer.tokenize(right):
        return 1.0
    scorer = rouge_scorer.RougeScorer(["rougeL"], tokenizer=tokenizer)
    return float(scorer.score(right, answer)["rougeL"].fmeasure)


class _Words:
    """Words of any script; rouge-score's own tokenizer is for ASCII."""

    def tokenize(self, text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())


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


def _check_lengths(
    questions: Sequence[Question], prompts: Sequence[QuestionPrompt], model: Any, answer_tokens: int
) -> None:
    context = model.config.get_text_config().max_position_embeddings
    for question, prompt in zip(questions, prompts, strict=True):
        if len(prompt.token_ids) + answer_tokens > context:
            raise PromptTooLong(
                f"the question {question.question!r} has {len(prompt.token_ids)} prompt tokens; with "
                f"{answer_tokens} for the answer that is more than the model's context ({context})"
            )


@torch.no_grad()
def _generated(model: Any, prompt: QuestionPrompt, max_new_tokens: int, pad: int) -> tuple[int, ...]:
    """Greedy tokens of the model's own ``generate``."""
    ids = torch.tensor([prompt.token_ids], device=model.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=pad,
    )
    return tuple(output[0, ids.shape[1] :].tolist())
