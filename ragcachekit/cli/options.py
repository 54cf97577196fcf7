"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ragcachekit.commands.checks import check_device, check_picture, check_writable
from ragcachekit.commands.corpus import corpus_root
from ragcachekit.errors import RagCacheError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")


def _device(name: str | None) -> str | None:
    if name is not None and name != "cpu":  # the check imports torch
        check_device(name)
    return name


def _plot(path: Path | None) -> Path | None:
    if path is not None:
        check_picture(path)
    return path


ModelName = Annotated[
    str | None, typer.Option("--model", help="Folder of a Hugging Face model, or a hub id.")
]
CorpusDir = Annotated[
    str, typer.Option("--corpus", help="Folder with your .txt, .md, .rst, .py and .html files.")
]
QuestionsFile = Annotated[
    Path | None, typer.Option("--questions", help='JSONL, per line {"question", "chunks", "answer"}.')
]
ProbedCorpus = Annotated[
    Path | None, typer.Option("--corpus", help="Folder of texts; without --questions, probes are made of it.")
]
Probes = Annotated[int, typer.Option("--probes", min=1, help="How many to make from the corpus.")]
ChunkTokens = Annotated[int, typer.Option("--chunk-tokens", min=1, help="Greatest size of a chunk.")]
CacheDir = Annotated[
    str | None, typer.Option("--cache", help="Cache folder; default: ragcachekit in the user's cache folder.")
]
DiskGb = Annotated[
    float | None, typer.Option("--disk-gb", help="Budget of the KV on disk in GB; default 68.7.")
]
Namespace = Annotated[str, typer.Option("--namespace", help="Tenant and corpus: a hard partition.")]

Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        help="Which reused tokens are recomputed: full, prefix, reuse, lego:16, lego0, deep:0.1, query:0.15, "
        "cacheblend:0.15, craft:1.0, heavy:0.15, lego:4+query:0.1, budget:0.01 (after calibrate).",
    ),
]
Policies = Annotated[
    str | None, typer.Option("--policies", help="With commas between; default: a list of all kinds.")
]
Encoder = Annotated[
    str | None,
    typer.Option(
        "--encoder",
        help="Context that chunks are encoded in: standalone, sinks:4, system, similar:1 (that, and the "
        "chunk before it in its file).",
    ),
]
Encoders = Annotated[
    str, typer.Option("--encoders", help="standalone,sinks:4,system, ...; standalone+int8: quantised.")
]
K = Annotated[int, typer.Option("-k", "--k", min=1, help="Chunks that are retrieved.")]
Tolerance = Annotated[
    float,
    typer.Option("--tolerance", min=0.0, help="Cosine distance up to which a question was asked before."),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Length of an answer.")]
Device = Annotated[
    str | None,
    typer.Option("--device", callback=_device, help="cpu, cuda, ...; default: a GPU if there is one."),
]
DeviceOrCpu = Annotated[str, typer.Option("--device", callback=_device)]
Dtype = Annotated[
    str, typer.Option("--dtype", help="auto (as the model was saved), float32, bfloat16, float16.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of all that is drawn, and of bounds.")]

Json = Annotated[Path | None, typer.Option("--json", help="Write machine, versions and all rows here.")]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", callback=_plot, help="Draw a picture here (.png, .svg, .pdf)."),
]
Resume = Annotated[
    Path | None,
    typer.Option("--resume", help="Keep results here and go on from them; default: beside --json."),
]


def model_given(name: str | None) -> str:
    """The model's name; RagCacheError if there is none."""
    if name is None:
        raise RagCacheError("which model? Give --model with the folder of a Hugging Face model or a hub id")
    return name


def check_folders(corpus: str | os.PathLike[str] | None, cache: str | None) -> None:
    """Check the folders, where they are given, before anything heavy is imported."""
    if corpus is not None:
        corpus_root(corpus)
    if cache is not None:
        check_writable(Path(cache).expanduser())


def check_questions(path: Path | None) -> None:
    """RagCacheError if a file is given and does not exist."""
    if path is not None and not path.is_file():
        raise RagCacheError(
            f"there is no file {path}; give --questions a JSONL file with an object "
            '{"question", "chunks", "answer"} per line'
        )


def settings_of(kind: type[Settings], options: Mapping[str, object], **others: object) -> Settings:
    """Settings from a command's options (its ``locals()``), by the names of the fields."""
    values = {**options, **others}
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})


def names(text: str | None) -> tuple[str, ...]:
    """The words between commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def numbers(option: str, text: str) -> tuple[float, ...]:
    """The numbers between commas."""
    try:
        return tuple(float(word) for word in names(text))
    except ValueError as error:
        raise ValueError(f"{option} takes numbers with commas between, as 0.01,0.04; got {text!r}") from error
