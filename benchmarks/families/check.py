"""``python -m benchmarks families``: every causal LM family of the installed transformers, one row each."""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from transformers.utils import logging as transformers_logging

from benchmarks.families.dialogues import DIALOGUES, Dialogues, bare, converse
from benchmarks.families.families import Family, all_families, build
from benchmarks.families.second_check import compare
from benchmarks.families.sizes import NOT_BUILT_BECAUSE
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, show, written
from ragcachekit.commands.report import BenchReport, versions
from ragcachekit.engine.grade import Grade
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import ModelNotSupported
from ragcachekit.model.snapshots import SnapshotLayout

LINKED, PREFIX, REFUSED, WRONG, NOT_BUILT = "linked", "prefix", "refused", "wrong", "not built here"
NOTHING = "nothing"
LONGEST_REASON = 400
TYPICAL_TOKENS, TYPICAL_STATES = 150, 3  # of a dialogue's prompt


def families(
    json: opt.Json = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the table here.")] = None,
) -> None:
    """Check a tiny random model of every family of the installed transformers.

    Ends with 1 if any answers otherwise than the bare model.
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
    """What the library reuses exactly on a tiny random model of the family.

    ``family`` is the ``model_type``, with the variant in brackets. ``status`` is the grade, ``linked`` or
    ``prefix``; or ``refused`` (no engine can be made), ``wrong`` (not what the bare model computes) or ``not
    built here`` (there is no tiny model that generates). ``stored`` is "nothing" where nothing is
    reused. ``max_abs_diff`` is the greatest difference of the second check of linked models, relative to the
    greatest value of its tensor.
    """

    family: str
    status: str
    reason: str = ""
    stored: str = ""
    token_bytes: int | None = None
    state_bytes: int | None = None
    max_abs_diff: float | None = None


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
    """The grade of one family, checked; whatever it raises ends up in its row."""
    try:
        model, oracle = build(family), build(family)
        bare(oracle, Dialogues(1).prompt(0))
    except Exception as error:  # a hundred families' own code: anything can come
        return FamilyCheck(family.name, NOT_BUILT, NOT_BUILT_BECAUSE.get(family.name, _said(error)))
    with tempfile.TemporaryDirectory(prefix="ragcachekit-") as folder:
        open_engine = partial(RagCache, model, cache_dir=folder)
        try:
            with open_engine() as rag:
                grade = rag.components.grade
            if grade.name == LINKED:
                return _linked(family, model, grade)
            return _prefix(family, grade, open_engine, oracle)
        except ModelNotSupported as error:
            return FamilyCheck(family.name, REFUSED, _said(error))
        except Exception as error:  # a user would see it, too
            return FamilyCheck(family.name, WRONG, f"{type(error).__name__}: {_said(error)}")


def _linked(family: Family, model: Any, grade: Grade) -> FamilyCheck:
    assert grade.layout is not None
    found = compare(model, build(family, oracle=True))
    stored = FamilyCheck(family.name, LINKED, "", grade.layout.stored, grade.layout.token_bytes)
    bad = [one for one in found if one.wrong]
    reason = f"{bad[0].what}: off by {bad[0].found:.2g}, allowed {bad[0].allowed:.0e}" if bad else ""
    return replace(
        stored,
        status=WRONG if bad else LINKED,
        reason=reason,
        max_abs_diff=max(one.found for one in found),
    )


def _prefix(family: Family, grade: Grade, open_engine: Callable[..., RagCache], oracle: Any) -> FamilyCheck:
    layout = grade.layout
    prompt_bytes = 0 if layout is None else TYPICAL_TOKENS * layout.token_bytes
    if isinstance(layout, SnapshotLayout):
        prompt_bytes += TYPICAL_STATES * layout.state_bytes
    course = converse(open_engine, oracle, prompt_bytes)
    if course.wrong:
        return FamilyCheck(family.name, WRONG, course.wrong)
    if not isinstance(layout, SnapshotLayout):
        return FamilyCheck(family.name, PREFIX, _cut(grade.why), NOTHING)
    if not (course.hits and course.evicted):
        return FamilyCheck(family.name, WRONG, f"{course.hits} hits and {course.evicted} evictions")
    return FamilyCheck(
        family.name, PREFIX, _cut(grade.why), layout.stored, layout.token_bytes, layout.state_bytes
    )


def summary(checks: Sequence[FamilyCheck]) -> str:
    """How many of each status."""
    counts = Counter(check.status for check in checks)
    return ", ".join(f"{counts[status]} {status}" for status in (LINKED, PREFIX, REFUSED, WRONG, NOT_BUILT))


def page(checks: Sequence[FamilyCheck]) -> str:
    """A page of the documentation: what the grades give, and the families by grade and by what is stored."""
    of = {
        status: [check for check in checks if check.status == status]
        for status in (LINKED, PREFIX, REFUSED, WRONG, NOT_BUILT)
    }
    nothing = [check for check in of[PREFIX] if check.stored == NOTHING]
    lines = [
        "# Which models work",
        "",
        *_EXPLAINED,
        "",
        f"Every causal LM family of transformers {versions()['transformers']}, on a tiny random model (some "
        f"in several configurations): **{summary(checks)}**; on {len(nothing)} of grade prefix nothing is "
        "reused. Bytes are those of the tiny models in float32. Written by `python -m benchmarks families "
        "--json benchmarks/results/families.json --markdown docs/models.md`; the JSON has every reason.",
        "",
        "## Linked",
        "",
        *_by_bytes(of[LINKED]),
        "",
        "## Prefix",
        "",
        *_by_stored([check for check in of[PREFIX] if check.stored != NOTHING]),
        "",
        *_WHY,
    ]
    for title, found in (
        ("Prefix, but nothing to reuse", nothing),
        ("Refused", of[REFUSED]),
        ("Wrong", of[WRONG]),
        ("Not built here", of[NOT_BUILT]),
    ):
        lines += ["", f"## {title}", "", *_by_reason(found)] if found else []
    return "\n".join(lines) + "\n"


_EXPLAINED = (
    "`RagCache(model)` tests the model and grades it. On this page you can look up the grade of a model "
    "family. For your own model, `rag.grade`, `repr(rag)` and `ragcachekit check-model MODEL` give the grade "
    "and the reason. Every causal LM works.",
    "",
    "- **linked**: chunks are reused anywhere in a prompt, in any order. Exact beginnings are reused "
    "as well.",
    "- **prefix**: only exact beginnings are reused: the system text, the documents after it while they are "
    "the same in the same order, earlier turns. Answers equal the bare model's. Put what repeats first, "
    'and give the [retriever](retrieval.md) `order="cached"`. Recurrent states are kept after the system '
    "text and every chunk.",
    "",
    "On some models (Ministral 3, Llama 4), attention depends on the absolute position beyond a certain "
    "token. Prompts up to there are linked. Longer ones are prefilled in full, with the reason in the "
    "report.",
    "",
    "Each model was compared with an untouched copy. Linked: with everything recomputed, logits are within "
    "1e-5 and greedy tokens equal; with four tokens of a chunk recomputed, logits, keys and values are "
    f"within 1e-4 of decoding token by token. Prefix: greedy tokens are equal in {DIALOGUES} random "
    "dialogues with hits, evictions, restarts and forgotten chunks.",
)


_WHY = (
    "Why some models with RoPE are not linked:",
    "",
    "- Beam scales queries by their position; Hunyuan multiplies queries and keys by a norm's weights after "
    "rotating them. They see a moved chunk as a different one.",
    "- Doge adds a weight per key to the mask, which the linked forward cannot do.",
    "- Falcon and GPT-NeoX Japanese have their own attention code and do not call a registered attention "
    "function.",
    "- Sparse attention with an indexer caches a third tensor per layer, rotated in another layout, and "
    "chooses keys with a mask.",
)


def _by_bytes(checks: Sequence[FamilyCheck]) -> list[str]:
    rows = _grouped(checks, lambda check: f"{check.token_bytes:,}")
    return ["| bytes per token (keys, values) | families |", "|---|---|", *rows]


def _by_stored(checks: Sequence[FamilyCheck]) -> list[str]:
    rows = _grouped(
        checks,
        lambda check: (
            f"{check.stored} | {check.token_bytes or 0:,}"
            + (f" + {check.state_bytes:,}" if check.state_bytes else "")
        ),
    )
    return ["| stored | bytes per token + state | families |", "|---|---|---|", *rows]


def _by_reason(checks: Sequence[FamilyCheck]) -> list[str]:
    """A table of reasons, without what names a single model, and their families."""

    def reason(check: FamilyCheck) -> str:
        last = check.reason.rpartition("; and nothing is reused, either: ")[2]
        last = re.sub(r"^\w+ (?=returns |caches )|, logits after .*|logits after .*", "", last)
        return last.replace("|", "/")

    return ["| reason | families |", "|---|---|", *_grouped(checks, reason)]


def _grouped(checks: Sequence[FamilyCheck], key: Callable[[FamilyCheck], str]) -> list[str]:
    """Table rows of the families with equal keys."""
    families: dict[str, list[str]] = {}
    for check in checks:
        families.setdefault(key(check), []).append(check.family)
    return [f"| {group} | {', '.join(sorted(names))} |" for group, names in sorted(families.items())]


def _said(error: Exception) -> str:
    return _cut(str(error) or type(error).__name__)


def _cut(text: str) -> str:
    text = " ".join(text.split())
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
