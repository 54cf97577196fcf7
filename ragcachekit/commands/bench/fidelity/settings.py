"""What the fidelity bench is asked to measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ragcachekit.commands.bench.fidelity.engines import BASELINES, FULL, Way, quantisation
from ragcachekit.commands.own_questions import Asking
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.plan.encodings import IN_PROMPT, Encodings
from ragcachekit.policies.registry import open_policy

POLICIES = (
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


@dataclass(frozen=True)
class FidelitySettings(Asking):
    """What is measured: every policy over every encoder.

    A policy that insists on an encoder gets that one only; ``full``, and ``reuse`` over ``system``, are
    always added. ``neighbours`` of ``similar:n`` are by ``embedding`` (all-MiniLM-L6-v2) or of the
    ``document`` (the chunks before).
    """

    encoders: tuple[str, ...] = ("standalone",)
    neighbours: str = EMBEDDING

    def check_neighbours(self, documents: bool) -> None:
        """ValueError for unknown neighbours, or for those of a document where no ``documents`` are known."""
        if self.neighbours not in (EMBEDDING, DOCUMENT):
            raise ValueError(f"unknown neighbours {self.neighbours!r}; known: {EMBEDDING}, {DOCUMENT}")
        if self.neighbours == DOCUMENT and not documents:
            raise ValueError(
                "a file of questions does not say what stands before a chunk; give --corpus, or use embedding"
            )


def chosen_ways(settings: FidelitySettings, model: Any, tokenizer: Any) -> list[Way]:
    """The baselines, then every policy over every encoder, once each.

    Raises ValueError for an unknown policy or encoder, or one that this model cannot have.
    """
    if not settings.encoders:
        raise ValueError("give at least one encoder, for example standalone")
    rope, out = describe_rope(model), dict.fromkeys(BASELINES)
    for name in settings.policies or POLICIES:
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
