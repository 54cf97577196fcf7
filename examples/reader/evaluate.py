"""Score a reader: `python examples/reader/evaluate.py benchmarks/world/reader`.

Prints, for each kind of question, the share of answers that are exactly right, with a 95 % Wilson interval:
with an ordinary prefill, with prefixes before the questions, with more or fewer articles, and with the KV of
chunks computed from each chunk alone, of which nothing or the first tokens are recomputed in the prompt.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout need not be installed

from packed import Coder
from tasks import Task, exam_tasks
from train import examine

from benchmarks.world.world import DEFAULT_SEED, Question, make_world, messages, variants


@dataclass(frozen=True)
class Setting:
    """One row of the table: which articles, whether prefixes are put, and what is recomputed."""

    name: str
    articles: int = 4
    prefixes: bool = False
    recompute: int | None = None
    rivals: bool = False


SETTINGS = (
    Setting("full"),
    Setting("full, prefixed", prefixes=True),
    Setting("full, 3 articles", articles=3),
    Setting("full, 5 articles", articles=5),
    Setting("full, 6 articles", articles=6),
    Setting("full, rivals", rivals=True),
    Setting("reuse", recompute=0),
    Setting("lego:2", recompute=2),
    Setting("lego:4", recompute=4),
    Setting("lego:8", recompute=8),
    Setting("lego:16", recompute=16),
    Setting("lego:24", recompute=24),
    Setting("reuse, rivals", recompute=0, rivals=True),
    Setting("lego:4, rivals", recompute=4, rivals=True),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--seed", type=int, default=DEFAULT_SEED, help="seed of the world that is asked about"
    )
    parser.add_argument("--number", type=int, default=500, help="questions of each kind")
    parser.add_argument("--generate", type=int, default=0, help="questions of each kind for `generate`")
    parser.add_argument("--rows", default="", help="only rows with this in their name")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    coder = Coder(tokenizer.get_vocab())
    world = make_world(args.seed)
    print(f"{args.number} questions of each kind, world {args.seed}, 95 % Wilson intervals")
    for setting in (setting for setting in SETTINGS if args.rows in setting.name):
        tasks = exam_tasks(world, args.seed, args.number, setting.articles, setting.rivals)
        if setting.prefixes:
            tasks = [_prefixed(task, i) for i, task in enumerate(tasks)]
        marks = examine(model, coder, tasks, setting.recompute)
        row = "  ".join(f"{kind} {_percent(share, args.number)}" for kind, share in marks.items())
        print(f"{setting.name:18s} {row}", flush=True)
    if args.generate:
        tasks = exam_tasks(world, args.seed, args.generate, 4)
        right = [generate(model, tokenizer, task) == task.questions[0].answer for task in tasks]
        print(f"through generate: {sum(right)} of {len(right)}")


def generate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task) -> str:
    """Answer the first question of a task as any user of the model would."""
    ids = tokenizer.apply_chat_template(
        messages(task.chunks, task.questions[0].text),
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**ids, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def wilson(share: float, number: int, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson score interval of a share of `number` trials."""
    middle = share + z * z / (2 * number)
    spread = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    return (middle - spread) / (1 + z * z / number), (middle + spread) / (1 + z * z / number)


def _percent(share: float, number: int) -> str:
    low, high = wilson(share, number)
    return f"{share:6.1%} [{low:.1%}, {high:.1%}]"


def _prefixed(task: Task, index: int) -> Task:
    return Task(task.chunks, task.subjects, _reword(task.questions, index))


def _reword(questions: Sequence[Question], index: int) -> tuple[Question, ...]:
    return tuple(replace(question, text=variants(question.text)[index % 4]) for question in questions)


if __name__ == "__main__":
    main()
