"""What a user's model is asked: questions from a file, or probes made from the user's corpus."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ragcachekit.bench.calibrate_probes import probes
from ragcachekit.bench.corpus import DEFAULT_CHUNK_TOKENS, Corpus, documents, read_corpus
from ragcachekit.bench.fidelity_questions import FidelityQuestion, read_questions
from ragcachekit.bench.workspace import load_tokenizer
from ragcachekit.link.neighbours import Neighbours, PrecedingChunks, SimilarChunks

ANSWERS, AGREEMENT = "answers", "agreement"
PROBES = 200


@dataclass(frozen=True)
class Sample:
    """Questions, how answers to them are judged, and the corpus if there is one."""

    questions: tuple[FidelityQuestion, ...]
    quality: str = ANSWERS
    corpus: Corpus | None = None


def read_sample(
    model: str,
    questions: str | os.PathLike[str] | None,
    corpus: str | os.PathLike[str] | None,
    *,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    number: int = PROBES,
    seed: int = 0,
) -> Sample:
    """Read the questions; without a file, make ``number`` probes from the corpus.

    Raises
    ------
    ValueError, CorpusError
        If neither is given, or one cannot be used.
    """
    if questions is None and corpus is None:
        raise ValueError("give --questions (JSONL), or --corpus to make probes from")
    found = None
    if corpus is not None:
        found = read_corpus(corpus, chunk_tokens=chunk_tokens, tokenizer=load_tokenizer(model))
    if questions is not None:
        return Sample(tuple(read_questions(questions)), ANSWERS, found)
    assert found is not None
    return Sample(tuple(probes(found.chunks, number, seed)), AGREEMENT, found)


def neighbours_of(sample: Sample, preceding: bool, progress: bool) -> Neighbours:
    """Neighbours for ``similar:n``: the chunks before in the corpus's files, or the nearest by MiniLM."""
    if preceding and sample.corpus is not None:
        return PrecedingChunks(documents(sample.corpus.chunks))
    from ragcachekit.bench.embedding import MiniLM  # an extra, and needed here only

    asked = (chunk for question in sample.questions for chunk in question.chunks)
    texts = list(dict.fromkeys([*(sample.corpus.texts if sample.corpus is not None else ()), *asked]))
    return SimilarChunks(texts, MiniLM().embed(texts, progress=progress))
