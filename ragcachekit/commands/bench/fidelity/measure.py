"""Results of a fidelity run, and the work file from which an interrupted run continues."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragcachekit.commands.bench.fidelity import metrics
from ragcachekit.commands.bench.fidelity.engines import FULL, Compared, Engines, Way
from ragcachekit.commands.bench.fidelity.prompts import FidelityPrompt
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.errors import RagCacheError

_FORMAT = 4


@dataclass(frozen=True)
class Measurement:
    """Result of one question in one way; plain values only.

    ``exact_match``, ``f1`` and ``rouge_l`` are against the right answer, ``agreement...`` against that of
    ``full``. ``kl`` is KL(full || this way) of the first token in nats, ``answer_kl`` its mean over the
    tokens of full's answer, given those before. ``answer_loss`` and ``gold_loss`` are nats per token of
    full's and of the right answer. Deviations are per layer, relative to ``full``, over the chunks' rows;
    ``attention_deviation`` is the mean over layers of that of values, each row weighed by the attention that
    it gets from the prompt's last rows in full. ``ratio_spent`` is recomputed / cached rows over all layers.
    """

    text: str
    exact_match: float
    f1: float
    rouge_l: float
    agreement: float
    agreement_rouge_l: float
    agreement_jaccard: float
    answer_tokens: int
    kl: float
    answer_kl: float
    answer_loss: float
    gold_loss: float
    key_deviation: tuple[float, ...]
    value_deviation: tuple[float, ...]
    attention_deviation: float
    ratio_spent: float
    prompt_tokens: int
    recomputed_tokens: int
    reused_tokens: int


@dataclass(frozen=True)
class Reference:
    """What ``full`` makes of a question, and the token ids of the right answer."""

    answer: Compared
    gold: tuple[int, ...]

    @classmethod
    def of(cls, engines: Engines, prompt: FidelityPrompt, gold: tuple[int, ...]) -> Reference:
        """Answer and prefill in full."""
        answer = engines.answer(prompt, FULL)
        prefilled, _ = engines.prefilled(prompt, FULL, (answer.token_ids, gold))
        return cls(Compared(answer.text, answer.token_ids, prefilled, answer.report.link), gold)


def measure(
    engines: Engines, question: FidelityQuestion, prompt: FidelityPrompt, way: Way, full: Reference
) -> Measurement:
    """Answer a question in one way and compare with ``full``; RagCacheError if it fell back to that."""
    engines.encode(question, prompt, way)
    right, gold = full.answer, full.gold
    found = right if way == FULL else engines.compared(prompt, way, right.token_ids, gold)
    if found.report.fallback:
        raise RagCacheError(
            f"{way} fell back to a full prefill ({found.report.fallback}): nothing to measure"
        )
    link, text, other = found.report, found.text.strip(), right.text.strip()
    one, two = right.prefilled, found.prefilled
    of_answer, of_gold = two.log_probs
    return Measurement(
        text=text,
        exact_match=max(metrics.exact_match(text, accepted) for accepted in question.answers),
        f1=max(metrics.token_f1(text, accepted) for accepted in question.answers),
        rouge_l=max(metrics.rouge_l(text, accepted) for accepted in question.answers),
        agreement=float(text == other),
        agreement_rouge_l=metrics.rouge_l(text, other),
        agreement_jaccard=metrics.jaccard(text, other),
        answer_tokens=len(found.token_ids),
        kl=metrics.divergence(one.log_probs[0][0], of_answer[0]),
        answer_kl=metrics.divergence(one.log_probs[0], of_answer),
        answer_loss=metrics.loss_per_token(of_answer, right.token_ids),
        gold_loss=metrics.loss_per_token(of_gold, gold),
        key_deviation=metrics.relative_deviations(one.keys, two.keys, prompt.spans),
        value_deviation=metrics.relative_deviations(one.values, two.values, prompt.spans),
        attention_deviation=metrics.attention_deviation(one.attention, one.values, two.values, prompt.spans),
        # By definition full recomputes all that could be cached; no chunk is known yet when it runs.
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
        self.results: dict[tuple[int, Way], Measurement] = {}
        self._file = None
        if path is not None:
            place = Path(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            self._read({"fidelity": _FORMAT, **header}, place)
            self._file = place.open("a", encoding="utf-8")

    def put(self, question: int, way: Way, found: Measurement) -> None:
        """Add a result."""
        self.results[question, way] = found
        if self._file is not None:
            line = {"question": question, "way": asdict(way), "result": asdict(found)}
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
                values: dict[str, Any] = entry["result"]
                values |= {name: tuple(values[name]) for name in ("key_deviation", "value_deviation")}
                self.results[entry["question"], Way(**entry["way"])] = Measurement(**values)
        except (ValueError, KeyError, TypeError) as error:
            raise RagCacheError(f"{path} is damaged; delete it and start again") from error
        if cut or not whole:
            path.write_text("".join(line + "\n" for line in (first, *lines)), encoding="utf-8")
