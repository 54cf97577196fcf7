"""What the fidelity bench is asked to measure."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ragcachekit.bench.fidelity_engines import BASELINES, FULL, Way, quantisation
from ragcachekit.bench.fidelity_questions import (
    FidelityQuestion,
    held_out_world,
    read_questions,
    world_questions,
)
from ragcachekit.bench.fidelity_sweeps import sweep_questions
from ragcachekit.bench.workspace import READER
from ragcachekit.link.encodings import IN_PROMPT, Encodings
from ragcachekit.link.neighbours import Neighbours, PrecedingChunks
from ragcachekit.link.policies import open_policy
from ragcachekit.model.rope_probe import describe_rope

WISHED = (
    "full",
    "reuse",
    "lego0",
    *(f"lego:{k}" for k in (1, 2, 4, 6, 12)),
    *(f"{kind}:{r}" for kind in ("random", "heavy", "query", "deep") for r in (0.05, 0.1, 0.15, 0.3)),
    *("cacheblend:0.05", "cacheblend:0.15", "cacheblend-gradual:0.15"),
    *(f"craft:{alpha}" for alpha in (0.1, 0.2, 0.3, 0.6)),  # over standalone half of it is spent
    "craft-focused:0.6",
)
EMBEDDING, DOCUMENT = "embedding", "document"
_PER_TYPE, _PER_TYPE_SWEEP = 100, 20
_TOKENS, _TOKENS_READER = 64, 16


@dataclass(frozen=True)
class FidelitySettings:
    """What is measured.

    Attributes
    ----------
    model : str
        Folder, hub id, or ``reader``.
    policies, encoders : tuple of str
        Every policy over every encoder; a policy that insists on an encoder gets that one only.
        ``full``, and ``reuse`` over ``system``, are always added.
    neighbours : {"embedding", "document"}
        Where the encoders ``similar:n`` get theirs: by all-MiniLM-L6-v2 among all chunks of the
        questions, or (sample world only) the chunks that stand before in the same article.
    questions : path, optional
        A JSONL file; default: the sample world.
    per_type : int, optional
        Questions of each kind about the sample world; default 100, in a sweep 20.
    seed : int
        Of the sample world and of the bootstrap.
    sweep : {"needle", "chunks"}, optional
    max_new_tokens : int, optional
        Default 16 for the reader, else 64.
    device, dtype : str, optional
        As for :func:`~ragcachekit.model.loading.load_model`.
    cache_dir : path, optional
        As for :class:`~ragcachekit.engine.RagCache`.
    """

    model: str = READER
    policies: tuple[str, ...] = ()
    encoders: tuple[str, ...] = ("standalone",)
    neighbours: str = EMBEDDING
    questions: str | os.PathLike[str] | None = None
    per_type: int | None = None
    seed: int = 0
    sweep: str | None = None
    max_new_tokens: int | None = None
    device: str | None = None
    dtype: str = "auto"
    cache_dir: str | os.PathLike[str] | None = None

    @property
    def new_tokens(self) -> int:
        """Longest answer."""
        return self.max_new_tokens or (_TOKENS_READER if self.model == READER else _TOKENS)


def default_policies() -> tuple[str, ...]:
    """Those of the wished policies that this version has."""
    return tuple(name for name in WISHED if _opens(name))


def chosen_questions(settings: FidelitySettings) -> list[FidelityQuestion]:
    """What is asked.

    Raises
    ------
    ValueError
        For bad questions, an unknown sweep, or a sweep of one's own questions.
    """
    per_type = settings.per_type or (_PER_TYPE_SWEEP if settings.sweep else _PER_TYPE)
    if settings.questions is not None:
        if settings.sweep is not None:
            raise ValueError("a sweep is made of the sample world's articles; leave out --questions")
        return read_questions(settings.questions)
    if settings.sweep is not None:
        return sweep_questions(settings.sweep, settings.seed, per_type)
    return world_questions(settings.seed, per_type)


def document_neighbours(settings: FidelitySettings) -> Neighbours | None:
    """The neighbours that the articles' own order gives, where asked for.

    Raises
    ------
    ValueError
        For an unknown name, or a file of questions, which says nothing of documents.
    """
    if settings.neighbours not in (EMBEDDING, DOCUMENT):
        raise ValueError(f"unknown neighbours {settings.neighbours!r}; known: {EMBEDDING}, {DOCUMENT}")
    if settings.neighbours == EMBEDDING:
        return None
    if settings.questions is not None:
        raise ValueError("a file of questions does not say what stands before a chunk; use embedding")
    return PrecedingChunks(article.chunks for article in held_out_world(settings.seed).articles)


def chosen_ways(settings: FidelitySettings, model: Any, tokenizer: Any) -> list[Way]:
    """The baselines, then every policy over every encoder, once each.

    Raises
    ------
    ValueError
        For an unknown policy or encoder, or one that this model cannot have.
    """
    if not settings.encoders:
        raise ValueError("give at least one encoder, for example standalone")
    rope, out = describe_rope(model), dict.fromkeys(BASELINES)
    for name in settings.policies or default_policies():
        policy = open_policy(name)
        if not policy.reads_cache:
            out[FULL] = None
            continue
        for encoder in (policy.encoder,) if policy.encoder else settings.encoders:
            # Opened here already: a typo should not cost an hour.
            if encoder == IN_PROMPT:
                raise ValueError(
                    "chunks are encoded in-prompt by earlier prompts, and asking a question would encode its "
                    "own context for the next policy; benchmarks/craft_in_prompt.py measures that"
                )
            plain, rounded = encoder.partition("+")[0], quantisation(encoder)
            found = Encodings(plain, rope, tokenizer.bos_token_id).name
            out[Way(policy.name, f"{found}+{rounded}" if rounded else found)] = None
    return list(out)


def _opens(name: str) -> bool:
    try:
        open_policy(name)
    except ValueError:
        return False
    return True
