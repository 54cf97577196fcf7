"""What the reader is trained and tested on: contexts of a few articles and the questions they answer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from packed import IGNORE, Coder, Packed
from torch import Tensor

from benchmarks.world.world import PREFIXES, TRAINING_SEEDS, Article, Question, World, make_world


@dataclass(frozen=True)
class Task:
    """Chunks in the order of the prompt, whom each is about, and questions that they answer."""

    chunks: tuple[str, ...]
    subjects: tuple[str, ...]
    questions: tuple[Question, ...]


def training_tasks(seed: int, fewest: int, most: int, names: int | None, pairs: int) -> Iterator[Task]:
    """Yield tasks for ever, of `fewest` to `most` articles each; every eight tasks a new world is drawn."""
    rng = random.Random(seed)
    while True:
        world = make_world(TRAINING_SEEDS + rng.getrandbits(62), people=12, companies=6, towns=6, names=names)
        for _ in range(8):
            articles = pick_articles(rng, world, rng.randint(fewest, most))
            asked = answerable(world, articles)
            rng.shuffle(asked)
            asked.sort(key=lambda question: question.kind != "c")  # the rare ones first
            yield Task(*_chunks(articles), tuple(_prefixed(rng, question) for question in asked[:pairs]))


def pick_articles(rng: random.Random, world: World, number: int) -> list[Article]:
    """Pick an article, most of those it links to, and others, in random order: as a retriever would."""
    by_title = {article.title: article for article in world.articles}
    kind = rng.choices(("person", "company", "town"), (8, 2, 1))[0]
    first = rng.choice([article for article in world.articles if article.kind == kind])
    linked = [by_title[title] for title in dict.fromkeys(first.links) if rng.random() < 0.8]
    rng.shuffle(linked)
    picked = [first, *linked][:number]
    rest = [article for article in world.articles if article not in picked]
    if rng.random() < 0.5:  # rivals, so that it matters whom a fact is about
        picked, rest = [first], [article for article in rest if article.kind == kind]
    picked += rng.sample(rest, number - len(picked))
    rng.shuffle(picked)
    return picked


def answerable(world: World, articles: Sequence[Article]) -> list[Question]:
    """Return the questions that need none but these articles."""
    titles = {article.title for article in articles}
    return [question for question in world.questions if titles.issuperset(question.articles)]


def exam_tasks(world: World, seed: int, number: int, articles: int = 4, rivals: bool = False) -> list[Task]:
    """Return one task per question, `number` questions of each kind, each among `articles` articles.

    Those are the ones needed, the ones they link to, and others; or, with `rivals`, the ones needed and
    others of the same kind as the one that the question names.
    """
    rng = random.Random(seed)
    by_title = {article.title: article for article in world.articles}
    tasks = []
    for kind in ("a", "b", "c"):
        for question in rng.sample([q for q in world.questions if q.kind == kind], number):
            needed = [by_title[title] for title in question.articles]
            linked = [] if rivals else [by_title[title] for article in needed for title in article.links]
            picked = list(dict.fromkeys([*needed, *linked]))[:articles]
            rest = [article for article in world.articles if article not in picked]
            if rivals:
                rest = [article for article in rest if article.kind == needed[0].kind]
            picked += rng.sample(rest, articles - len(picked))
            rng.shuffle(picked)
            tasks.append(Task(*_chunks(picked), (question,)))
    return tasks


def topics(coder: Coder, tasks: Sequence[Task], batch: Packed) -> Tensor:
    """Label every token with the last word of the name it is about, [B, C + P * Q], -100 if none yet."""
    kinds = {coder.last(kind) for kind in ("person", "company", "town")}
    context = torch.full_like(batch.context, IGNORE)
    pairs = torch.full_like(batch.pairs, IGNORE)
    for b, task in enumerate(tasks):
        for number, title in enumerate(task.subjects, 1):
            places = (batch.owner[b] == number).nonzero()[:, 0]
            name = coder.last(title)
            said = [
                i for i in places.tolist() if int(batch.context[b, i]) in ({name} if number % 2 else kinds)
            ]
            context[b, said[0] : int(places[-1]) + 1] = name
        for p, question in enumerate(task.questions):
            name = coder.last(question.articles[0])
            ids = batch.pairs[b, p].tolist()
            end = int((batch.labels[b, p] != IGNORE).nonzero()[0, 0])
            pairs[b, p, ids.index(name) : end + 1] = name
            if question.kind == "c":
                pairs[b, p, end + 1 : end + 3] = coder.last(question.articles[1])
    return torch.cat([context, pairs.flatten(1)], 1)


def copying(
    generator: torch.Generator, tokens: Tensor, batch: int, length: int, periods: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Random sequences of `tokens`, repeated to the end: ids [B, T] and labels, shifted, -100 before that."""
    ids = tokens[torch.randint(len(tokens), (batch, length), generator=generator)]
    ids[:, 0] = 1
    labels = torch.full_like(ids, IGNORE)
    for row in range(batch):
        period = int(torch.randint(*periods, (1,), generator=generator))
        times = -(-length // period)
        ids[row, 1:] = ids[row, 1 : 1 + period].repeat(times)[: length - 1]
        labels[row, 1 + period : -1] = ids[row, 2 + period :]
    return ids, labels


def _chunks(articles: Sequence[Article]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    pairs = [(chunk, article.title) for article in articles for chunk in article.chunks]
    return tuple(chunk for chunk, _ in pairs), tuple(title for _, title in pairs)


def _prefixed(rng: random.Random, question: Question) -> Question:
    if rng.random() < 0.6:
        return question
    text = f"{rng.choice(PREFIXES)} {question.text}"
    return Question(
        text, question.answer, question.kind, question.articles, question.evidence, question.relation
    )
