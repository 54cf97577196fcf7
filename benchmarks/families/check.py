"""``python -m benchmarks families``: every causal LM family of the installed transformers, one row each."""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from transformers.utils import logging as transformers_logging

from benchmarks.families.families import Family, all_families, build
from benchmarks.families.second_check import compare
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, show, written
from ragcachekit.commands.report import BenchReport, versions
from ragcachekit.engine.admission import admit
from ragcachekit.errors import ModelNotSupported
from ragcachekit.model.rope import describe_rope

EXACT, REFUSED, WRONG = "exact", "refused", "wrong"
LONGEST_REASON = 240


def families(
    json: opt.Json = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the table here.")] = None,
) -> None:
    """Check a tiny random model of every family of the installed transformers.

    Ends with 1 if any family was admitted and came out wrong.
    """
    quiet_loading()
    checks = run()
    found = BenchReport("check-model", "tiny random models of all families", 0, tuple(map(vars, checks)))
    show(found.table("Families of causal language models, tiny random models"))
    typer.echo(summary(checks))
    written(found, json)
    if markdown is not None:
        markdown.write_text(page(checks))
    raise typer.Exit(1 if any(check.status == WRONG for check in checks) else 0)


@dataclass(frozen=True)
class FamilyCheck:
    """Whether the library gives what a tiny random model of the family computes.

    ``family`` is the ``model_type``, with the variant in brackets. ``status`` is ``exact`` (passed the
    admission check and the second one), ``refused`` (the library will not link it, or no tiny model could be
    built) or ``wrong`` (admitted, and the second check failed). ``max_abs_diff`` is the greatest difference
    of both checks, relative to the greatest value of its tensor.
    """

    family: str
    status: str
    reason: str
    max_abs_diff: float | None


def run(chosen: Sequence[Family] | None = None, *, progress: bool = True) -> tuple[FamilyCheck, ...]:
    """Check the families (default: all), with a progress bar on the standard error."""
    chosen = all_families() if chosen is None else chosen
    console = Console(stderr=True)
    with _quiet():
        return tuple(
            check_family(family)
            for family in track(chosen, "families", console=console, disable=not progress, transient=True)
        )


def check_family(family: Family) -> FamilyCheck:
    """Both checks of one family; whatever it raises ends up in its row."""
    try:
        model, oracle = build(family), build(family, oracle=True)
    except Exception as error:  # a hundred families' own code: anything can come
        return FamilyCheck(family.name, REFUSED, f"not built: {_said(error)}", None)
    try:
        with torch.no_grad():
            passed = admit(model, describe_rope(model))
        found = compare(model, oracle)
    except ModelNotSupported as error:
        return FamilyCheck(family.name, REFUSED, _said(error), None)
    except Exception as error:  # a user would see it too: neither exact nor refused
        return FamilyCheck(family.name, WRONG, f"{type(error).__name__}: {_said(error)}", None)
    worst = max(passed.difference, *(one.found for one in found))
    if bad := [one for one in found if one.wrong]:
        reason = f"{bad[0].what}: off by {bad[0].found:.2g}, allowed {bad[0].allowed:.0e}"
        return FamilyCheck(family.name, WRONG, reason, worst)
    return FamilyCheck(family.name, EXACT, "", worst)


def summary(checks: Sequence[FamilyCheck]) -> str:
    """How many of each status."""
    counts = Counter(check.status for check in checks)
    return ", ".join(f"{counts[status]} {status}" for status in (EXACT, REFUSED, WRONG))


def page(checks: Sequence[FamilyCheck]) -> str:
    """A page of the documentation: the exact families, and the others by reason."""
    of = {status: [check for check in checks if check.status == status] for status in (EXACT, REFUSED, WRONG)}
    worst = max((check.max_abs_diff or 0.0 for check in of[EXACT]), default=0.0)
    lines = [
        "# Which models can be linked",
        "",
        f"Every causal LM family of transformers {versions()['transformers']}, checked on a tiny random "
        f"model of each (some in several configurations): **{summary(checks)}**. Written by "
        "`python -m benchmarks families --json benchmarks/results/families.json --markdown docs/models.md`.",
        "",
        *_EXPLAINED,
        "",
        "## Exact",
        "",
        f"The greatest difference is {worst:.1e}.",
        "",
        ", ".join(sorted(check.family for check in of[EXACT])),
        "",
        "## Refused",
        "",
        *_by_reason(of[REFUSED]),
        "",
        *_WHY,
        *(["", "## Wrong", "", *_by_reason(of[WRONG])] if of[WRONG] else []),
    ]
    return "\n".join(lines) + "\n"


_EXPLAINED = (
    "**Exact**: the admission check passes (a chunk linked at an offset is the chunk run there; a "
    "prompt with some rows kept is its ordinary prefill), and so does a second check by other code: a "
    "longer prompt with three chunks, through the store and `generate`, against a copy of the model "
    "that the library never touches. With every row recomputed, logits are those of the ordinary "
    "prefill within 1e-5 and greedy tokens are equal; with four tokens of each chunk recomputed, "
    "logits, tokens, keys and values are those of one plain decoding step per computed row within 1e-4."
    " Differences are relative to the greatest value of a tensor, in float32. **Refused**: `RagCache` "
    "raises `ModelNotSupported`, or no tiny model could be built here. **Wrong**: admitted, and the "
    "second check fails.",
    "",
    "Where attention depends on positions from some token on (Ministral 3: "
    "`original_max_position_embeddings`; Llama 4: `attention_chunk_size` and `floor_scale`), prompts up to "
    "there are linked. Longer ones are prefilled in full, with the reason in the report.",
    "",
    "A model of your own is checked at its first use, and by `ragcachekit check-model MODEL`: its "
    "configuration may differ from the one checked here.",
)


_WHY = (
    "- Beam scales queries by their position from the first token on. Hunyuan multiplies queries and keys by "
    "a norm's weights after rotating them. A chunk at another place is another chunk there.",
    "- Doge adds a weight per key, computed from its value, to the mask. Linked forwards have no mask.",
    "- Falcon and GPT-NeoX Japanese attend by code of their own; a registered function is not called.",
    "- Sparse attention with an indexer (DeepSeek V3.2, GLM MoE DSA, AXK2, dots3 note, HY V4) caches a third "
    "tensor per layer, rotated in another layout, chooses keys over a mask that linked forwards do not have, "
    "and applies that choice itself only under the names `eager` and `sdpa`.",
)


def _by_reason(checks: Sequence[FamilyCheck]) -> list[str]:
    """A table of reasons, without what names a single model, and their families; all of it is in the JSON."""
    families: dict[str, list[str]] = {}
    for check in checks:
        reason = re.sub(r"^\w+ (?=uses |does |cannot |has )|^layer \d+: ", "", check.reason)
        reason = reason.partition(":")[0].partition(" (off by ")[0]
        reason = re.sub(r" by [\d.]+ of the largest value.*| at offset \d+", "", reason)
        families.setdefault(reason, []).append(check.family)
    rows = (
        f"| {reason.replace('|', '/')} | {', '.join(sorted(names))} |" for reason, names in families.items()
    )
    return ["| reason | families |", "|---|---|", *rows]


def _said(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says about odd configurations; they are odd on purpose."""
    before: Any = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(before)
