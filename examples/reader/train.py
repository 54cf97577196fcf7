"""Train the reader from nothing: `python examples/reader/train.py --out DIR`.

First it learns to copy random token sequences, without which it never learns to look anything up. Then it
reads: two articles with few names, until it has learned the relations; then the heads that compare subjects
are put in (`bind.py`); then more names and more articles. A stage ends when it is mastered. Beside the
answers it must tell from a middle layer whom each token is about (`topics`), and while it reads two
articles the questions see the context in the upper layers only (`--blind`): else it answers too early,
before it knows whom a fact is about. `--minutes` ends the training early, with the learning rate lowered in
time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout need not be installed

from bind import bind
from packed import IGNORE, Coder, Packed, forward, logits, pack
from tasks import Task, copying, exam_tasks, topics, training_tasks
from tokenizer import CONTEXT_LENGTH, build_tokenizer

from benchmarks.world.world import make_world

# fewest and most articles in a context, how many different names (None: all)
LEVELS = ((2, 2, 12), (2, 3, None), (3, 4, None), (2, 5, None))
MASTERED = 0.9  # share of right answers of kinds a and b, running mean, at which the next level starts
# how many different words, length of the sequence, least and most words before it repeats
COPY_LEVELS = ((60, 32, (3, 10)), (300, 32, (3, 12)), (None, 48, (4, 24)), (None, 96, (16, 48)))
COPIED = 0.9
DEVELOPMENT_SEED = 1


def main() -> None:
    """Run the training."""
    args = _arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer = build_tokenizer()
    coder = Coder(tokenizer.get_vocab())
    model = LlamaForCausalLM.from_pretrained(args.resume) if args.resume else _new_model(tokenizer, args)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} words", flush=True)
    if not args.resume:
        _learn_copying(model, args)
    _learn_reading(model, tokenizer, coder, args)


def _learn_copying(model: LlamaForCausalLM, args: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = _optimizer(model, args)
    words = torch.arange(6, model.config.vocab_size)
    words = words[torch.randperm(len(words), generator=generator)]
    level, copied, start = 0, 0.0, time.monotonic()
    for step in range(1, args.copy_steps + 1):
        pool, length, periods = COPY_LEVELS[level]
        ids, labels = copying(generator, words[:pool], 32, length, periods)
        empty = torch.zeros(len(ids), 0, 1, dtype=torch.long)
        batch = Packed(ids, torch.zeros_like(ids), torch.full((len(ids),), ids.shape[1]), empty, empty)
        with torch.autocast("cpu", torch.bfloat16):
            hidden, _ = forward(model, batch)
            scores = logits(model, hidden[labels != IGNORE]).float()
        wanted = labels[labels != IGNORE]
        loss = F.cross_entropy(scores, wanted)
        _update(model, optimizer, loss, args.copy_lr * min(1.0, step / args.warmup))
        copied += 0.05 * (_share(scores, wanted) - copied)
        if step % 50 == 0:
            spent = time.monotonic() - start
            print(
                f"copying {level} step {step:5d}  loss {loss:.3f} right {copied:.3f}  {spent:.0f} s",
                flush=True,
            )
        if copied > COPIED:
            level, copied = level + 1, 0.0
            if level == len(COPY_LEVELS):
                break


def _learn_reading(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, coder: Coder, args: argparse.Namespace
) -> None:
    probe = _probe(model)
    optimizer = _optimizer(model, args)
    optimizer.add_param_group({"params": list(probe.parameters()), "weight_decay": 0.0})
    exam = exam_tasks(make_world(DEVELOPMENT_SEED), seed=0, number=args.exam)
    level = args.level
    source = _source(args, level)
    known, best, start = 0.0, -1.0, time.monotonic()
    for step in range(1, args.steps + 1):
        done = max(step / args.steps, (time.monotonic() - start) / 60 / args.minutes)
        tasks = list(islice(source, args.contexts))
        batch = pack(coder, [(task.chunks, [(q.text, q.answer) for q in task.questions]) for task in tasks])
        asked = batch.labels != IGNORE
        with torch.autocast("cpu", torch.bfloat16):
            taps: dict[int, Tensor] = {}
            context, pairs = forward(model, batch, taps=taps, blind=args.blind if level == 0 else 0)
            about = topics(coder, tasks, batch)
            guess = logits(model, probe(taps[args.tap][about != IGNORE])).float()
            scores = logits(model, pairs[asked]).float()
            heard = logits(model, context[:, :-1]).float()
        wanted = batch.labels[asked]
        inside = torch.arange(1, batch.context.shape[1]) < batch.length[:, None]
        language = F.cross_entropy(heard[inside], batch.context[:, 1:][inside])
        answers = F.cross_entropy(scores, wanted)
        topic = F.cross_entropy(guess, about[about != IGNORE])
        _update(
            model, optimizer, answers + args.language * language + args.topic * topic, _rate(step, done, args)
        )
        known += 0.02 * (_known(tasks, batch, scores) - known)
        if step % 50 == 0:
            spent = time.monotonic() - start
            print(
                f"level {level} step {step:6d}  answers {answers:.3f}  language {language:.3f}  "
                f"topic {topic:.3f}  a+b {known:.3f}  {spent:.0f} s",
                flush=True,
            )
        if level == 0 and known > args.bind_at:
            middle = args.tap + 1
            bind(
                model,
                coder,
                training_tasks(args.seed, 2, 4, None, args.pairs),
                (middle, middle + 1),
                args.blind,
            )
            args.bind_at, known = math.inf, 0.0
            print(f"bound at step {step}", flush=True)
        if known > MASTERED and level + 1 < len(LEVELS):
            level, known = level + 1, 0.0
            source = _source(args, level)
        if step % args.every == 0 or done >= 1:
            marks = examine(model, coder, exam)
            print(f"  exam at {step}: {json.dumps(marks)}", flush=True)
            if sum(marks.values()) >= best:
                best = sum(marks.values())
                save(model, tokenizer, args.out)
        if done >= 1:
            break


@torch.no_grad()
def examine(
    model: LlamaForCausalLM, coder: Coder, tasks: list[Task], recompute: int | None = None
) -> dict[str, float]:
    """Return the share of wholly right greedy answers by kind; one question per task."""
    right: dict[str, list[bool]] = {}
    for start in range(0, len(tasks), 16):
        some = tasks[start : start + 16]
        batch = pack(coder, [(task.chunks, [(q.text, q.answer) for q in task.questions]) for task in some])
        _, pairs = forward(model, batch, recompute)
        hit = (logits(model, pairs).argmax(-1) == batch.labels) | (batch.labels == IGNORE)
        for task, row in zip(some, hit.all(-1), strict=True):
            right.setdefault(task.questions[0].kind, []).append(bool(row[0]))
    return {kind: sum(marks) / len(marks) for kind, marks in sorted(right.items())}


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write everything that `from_pretrained` needs."""
    model.generation_config.update(do_sample=False, max_new_tokens=32)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)


def _new_model(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    _look_back(model)
    return model


@torch.no_grad()
def _look_back(model: LlamaForCausalLM) -> None:
    """Start one key head of the first layer as one that looks at the previous token, whatever it is.

    All embeddings get a common part, from which queries and keys are made whose rotation agrees best at
    distance one. Copying needs such a head, and to find one takes longer than to learn all the rest.
    """
    attention, frequencies = model.model.layers[0].self_attn, 8
    angle = model.model.rotary_emb.inv_freq[:frequencies]
    half = attention.head_dim // 2
    query, key = torch.zeros(attention.head_dim), torch.zeros(attention.head_dim)
    query[:frequencies], query[half : half + frequencies] = angle.cos(), -angle.sin()
    key[:frequencies] = 1
    width = model.config.hidden_size
    common = torch.full((width,), width**-0.5)
    model.model.embed_tokens.weight += 0.09
    attention.q_proj.weight[: attention.head_dim] = 0.7 * query[:, None] * common
    attention.k_proj.weight[: attention.head_dim] = 0.7 * key[:, None] * common


def _probe(model: LlamaForCausalLM) -> torch.nn.Module:
    """Make the head, used in training only, that must tell from a middle layer whom each token is about."""
    width = model.config.hidden_size
    linear = torch.nn.Linear(width, width, bias=False)
    torch.nn.init.eye_(linear.weight)
    return torch.nn.Sequential(torch.nn.RMSNorm(width), linear)


def _optimizer(model: LlamaForCausalLM, args: argparse.Namespace) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": args.decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True)


def _rate(step: int, done: float, args: argparse.Namespace) -> float:
    """Warm up, hold, and over the last part go down to a fiftieth along a cosine."""
    left = min(1.0, max(0.0, 1 - done) / args.cooldown)
    return float(args.lr * min(1.0, step / args.warmup) * (0.02 + 0.98 * (1 - math.cos(math.pi * left)) / 2))


def _update(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _source(args: argparse.Namespace, level: int) -> Iterator[Task]:
    return training_tasks(args.seed * 100 + level, *LEVELS[level], args.pairs)


def _share(scores: Tensor, wanted: Tensor) -> float:
    return float((scores.argmax(-1) == wanted).float().mean())


def _known(tasks: list[Task], batch: Packed, scores: Tensor) -> float:
    asked = batch.labels != IGNORE
    wrong = torch.zeros_like(asked)
    wrong[asked] = scores.argmax(-1) != batch.labels[asked]
    right = ~wrong.any(-1)
    marks = [
        bool(right[b, p])
        for b, task in enumerate(tasks)
        for p, question in enumerate(task.questions)
        if question.kind != "c"
    ]
    return sum(marks) / max(len(marks), 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the best model so far")
    parser.add_argument("--resume", type=Path, default=None, help="folder of a model to go on from")
    parser.add_argument("--level", type=int, default=0, help="level to start with (with --resume)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--inner", type=int, default=256, help="width inside the MLP")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--copy-lr", type=float, default=1.5e-3)
    parser.add_argument("--decay", type=float, default=0.05, help="weight decay")
    parser.add_argument(
        "--language", type=float, default=0.1, help="weight of the loss on the context itself"
    )
    parser.add_argument(
        "--topic", type=float, default=1.0, help="weight of the loss on whom tokens are about"
    )
    parser.add_argument("--tap", type=int, default=2, help="layer from whose output that is to be told")
    parser.add_argument(
        "--blind", type=int, default=3, help="layers in which questions see no context at first"
    )
    parser.add_argument(
        "--bind-at",
        type=float,
        default=0.55,
        help="share of right answers at which subjects are bound (bind.py)",
    )
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--copy-steps", type=int, default=3000, help="most steps of copying")
    parser.add_argument("--steps", type=int, default=5000, help="steps of reading")
    parser.add_argument("--minutes", type=float, default=math.inf, help="most minutes of reading")
    parser.add_argument("--cooldown", type=float, default=0.3, help="last part, in which the rate goes down")
    parser.add_argument("--contexts", type=int, default=8, help="contexts in a batch")
    parser.add_argument("--pairs", type=int, default=20, help="most questions about one context")
    parser.add_argument("--every", type=int, default=250, help="steps between exams")
    parser.add_argument("--exam", type=int, default=100, help="questions of each kind in an exam")
    return parser.parse_args()


if __name__ == "__main__":
    main()
