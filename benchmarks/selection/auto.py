"""How far ``policy="auto"`` is from the best fixed choice: every candidate, measured on other prompts."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.world.questions import held_out_world, world_questions
from benchmarks.world.reader_folder import ANSWER_TOKENS, READER
from ragcachekit import PrecedingChunks, RagCache
from ragcachekit.cli.console import show
from ragcachekit.commands.bench.fidelity.engines import FULL, Engines, Way
from ragcachekit.commands.bench.fidelity.metrics import token_f1
from ragcachekit.commands.bench.fidelity.prompts import FidelityPrompt, PromptMaker
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.calibrate.probes import probes
from ragcachekit.commands.corpus import documents, read_corpus
from ragcachekit.commands.sample_model import sample_model
from ragcachekit.engine.auto.prompts import PROMPTS
from ragcachekit.engine.shadow import divergence
from ragcachekit.model.pretrained import load_model
from ragcachekit.plan.neighbours import Neighbours
from ragcachekit.policies.auto import MOST_RATIO, Pair, candidates

DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("reader", "random", "sample"), default="reader")
    parser.add_argument("--neighbours", action="store_true", help="The chunks before, as neighbours.")
    parser.add_argument("--sentences", action="store_true", help="Check on chunks, not prompts.")
    parser.add_argument("--count", type=int, default=60, help="Prompts on which candidates are measured.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args()
    model, tokenizer = _model(options.model, options.seed)
    questions, known = _questions(options.model, options.count + PROMPTS, options.seed)
    near = known if options.neighbours else None
    maker = PromptMaker(tokenizer)
    asked = [(question, maker.prompt(question)) for question in questions]
    with tempfile.TemporaryDirectory(prefix="ragcachekit-auto-") as folder:
        chosen, seconds = _tuned(model, tokenizer, asked[:PROMPTS], near, folder, options.sentences)
        pairs = candidates(None, near is not None)
        rows = _rows(model, tokenizer, asked[PROMPTS:], pairs, near, folder, options.model == "random")
    for row in rows:
        row["auto"] = (row["encoder"], row["policy"]) == chosen
        row["seconds"] = seconds if row["auto"] else None
    report = BenchReport("auto", options.model, options.seed, tuple(rows))
    show(report.table(f"Fixed candidates on {options.count} prompts, and the choice of auto"))
    if options.json:
        report.write_json(options.json)


def _model(name: str, seed: int) -> tuple[Any, Any]:
    model, tokenizer = load_model(sample_model() if name == "sample" else READER, "cpu")
    if name == "random":
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(model.config).eval()
    return model, tokenizer


def _questions(name: str, count: int, seed: int) -> tuple[list[FidelityQuestion], Neighbours]:
    if name != "sample":
        articles = [article.chunks for article in held_out_world(seed).articles]
        questions: list[FidelityQuestion] = [*world_questions(seed, -(-count // 3))]
        return questions[:count], PrecedingChunks(articles)
    chunks = read_corpus(DOCS, chunk_tokens=100).chunks
    return probes(chunks, count, seed), PrecedingChunks(documents(chunks))


def _tuned(
    model: Any,
    tokenizer: Any,
    asked: Sequence[tuple[FidelityQuestion, FidelityPrompt]],
    near: Neighbours | None,
    folder: str,
    sentences: bool,
) -> tuple[Pair, float]:
    begun = time.monotonic()
    with RagCache(model, tokenizer, neighbours=near, cache_dir=folder) as rag:
        if sentences:
            texts = [chunk for question, _ in asked for chunk in question.chunks]
            found = rag.tune(texts, system=asked[0][1].before)
        else:
            found = rag.tune(prompts=[prompt.prompt for _, prompt in asked])
    print(found)
    return found.pair, time.monotonic() - begun


def _rows(
    model: Any,
    tokenizer: Any,
    asked: Sequence[tuple[FidelityQuestion, FidelityPrompt]],
    pairs: Iterable[Pair],
    near: Neighbours | None,
    folder: str,
    agreement: bool,
) -> list[dict[str, Any]]:
    """Per candidate mean F1 (``agreement``: against full's answers), KL of full's answer, and ratio."""
    ways = [Way(policy, encoder) for encoder, policy in pairs]
    engines = Engines(
        model,
        tokenizer,
        dict.fromkeys(way.encoder for way in ways),
        max_new_tokens=ANSWER_TOKENS,
        neighbours=near,
        cache_dir=folder,
    )
    measured: dict[Way, list[tuple[float, float, float]]] = {way: [] for way in (FULL, *ways)}
    for question, prompt in asked:
        full = engines.answer(prompt, FULL)
        exact = engines.prefilled(prompt, FULL, [full.token_ids[:-1]])[0].log_probs[0]
        right = full.text if agreement else question.answer
        for way, found in measured.items():
            engines.encode(question, prompt, way)
            text = engines.answer(prompt, way).text
            reused, report = engines.prefilled(prompt, way, [full.token_ids[:-1]])
            kl = [divergence(one, other) for one, other in zip(exact, reused.log_probs[0], strict=True)]
            found.append((token_f1(text.strip(), right), sum(kl) / len(kl), report.recompute_ratio))
    engines.close()
    rows = []
    for way, found in measured.items():
        f1, kl_mean, ratio = torch.tensor(found).mean(0).tolist()
        names = {"encoder": way.encoder, "policy": way.policy}
        rows.append(names | {"f1": f1, "kl": kl_mean, "ratio": ratio, "eligible": ratio <= MOST_RATIO})
    return rows


if __name__ == "__main__":
    main()
