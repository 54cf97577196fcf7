"""Options that several commands share, checked before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ragcachekit.commands.corpus import check_corpus
from ragcachekit.commands.workspace import CacheFolder, explained
from ragcachekit.config import QUANTISATIONS
from ragcachekit.errors import RagCacheError
from ragcachekit.types import encoder_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DTYPES = ("auto", "float32", "bfloat16", "float16")
COLD_DISK = "disk-cold"  # the disk tier after the system has dropped its files from the page cache
KNOWN_TIERS = ("gpu", "host", "disk", *((COLD_DISK,) if hasattr(os, "posix_fadvise") else ()))

MODEL_FILES = ("config.json", "adapter_config.json")
"""One of them is in every folder of a model."""

Settings = TypeVar("Settings", bound="DataclassInstance")


def _model(name: str) -> str:
    if not name:
        raise RagCacheError("which model? Give --model with the folder of a Hugging Face model or a hub id")
    if Path(name).is_dir() and not any((Path(name) / file).is_file() for file in MODEL_FILES):
        raise RagCacheError(
            f"cannot load the model: {name} is no model folder; give the folder of a Hugging Face model or a "
            "hub id"
        )
    from ragcachekit.model.loading import SAMPLE, check_at_hand

    if name != SAMPLE:
        with explained(name):
            check_at_hand(name)
    return name


def _policies(param: typer.CallbackParam, text: str | None) -> str | None:
    if text != param.default:
        from ragcachekit.policies.registry import open_policy  # imports torch

        for name in names(text):
            open_policy(name)
    return text


def _encoders(text: str | None) -> str | None:
    if text is not None and not names(text):
        raise ValueError("give at least one encoder, for example standalone")
    for name in names(text):
        plain, _, kind = name.partition("+")
        encoder_name(plain)
        if kind:
            check_known("roundings", [kind], QUANTISATIONS)
    return text


def _namespace(name: str) -> str:
    if not name:
        raise ValueError("--namespace is empty; give the name of a tenant, or leave it out")
    return name


def _budget(loss: float) -> float:
    if not 0 < loss < 1:
        raise ValueError(f"--budget {loss:g}: give nats per answer token between 0 and 1, such as 0.05")
    return loss


def check_known(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    """ValueError for other names than the known ones, or none at all."""
    if not given or not set(given) <= set(known):
        raise ValueError(f"unknown {what} {', '.join(given) or repr('')}; known: {', '.join(known)}")


def _tiers(text: str) -> str:
    check_known("tiers", names(text), KNOWN_TIERS)
    return text


def _dtypes(text: str) -> str:
    check_known("dtypes", names(text), DTYPES[1:])
    return text


def _sizes(param: typer.CallbackParam, text: str) -> str:
    found = numbers(option := param.opts[0], text)
    if not found or not all(size > 0 and size.is_integer() for size in found):
        raise ValueError(f"{option} {text!r}: give whole numbers with commas between, as 2048,8192")
    return text


def _json(path: Path | None) -> Path | None:
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        what = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise RagCacheError(f"--json {path}: {what}; give a file to write")
    return path


def check_sample(questions: object, corpus: object) -> None:
    """ValueError where neither a file of questions nor a corpus is given."""
    if questions is None and corpus is None:
        raise ValueError("give --questions (JSONL), or --corpus to make probes from")


def check_file(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """The file as it was given; RagCacheError if there is none."""
    if path is not None and not path.is_file():
        raise RagCacheError(
            f"there is no file {path}; give --{param.name} a JSONL file with an object "
            '{"question", "chunks", "answer"} per line'
        )
    return path


def check_cache(folder: str | None) -> str | None:
    """The folder as it was given; RagCacheError if it cannot be written."""
    if folder is not None:
        CacheFolder.at(folder).check_writable()
    return folder


def _device(name: str | None) -> str | None:
    if name is None or name == "cpu":
        return name
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"--device {name}: this machine has no such device ({why})") from error
    return name


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return name


# Of ``bench ttft``, over a model and over random weights.
PromptTokens = Annotated[str, typer.Option(callback=_sizes, help="Of the whole prompt; sizes with commas.")]
PromptChunkTokens = Annotated[int, typer.Option(min=1, help="Of each chunk, about.")]
QuestionTokens = Annotated[int, typer.Option(min=1)]
PolicyNames = Annotated[str, typer.Option(callback=_policies, help="With commas between.")]
Tiers = Annotated[str, typer.Option(callback=_tiers, help="Where the KV lies: gpu, host, disk, disk-cold.")]
Dtypes = Annotated[str, typer.Option(callback=_dtypes, help="float32, bfloat16, float16; with commas.")]
Runs = Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")]

_MODEL = "Folder of a Hugging Face model, a hub id, or 'sample' (SmolLM2-135M-Instruct)."
Model = Annotated[str, typer.Option(callback=_model, help=_MODEL)]
ModelArgument = Annotated[str, typer.Argument(callback=_model, help=_MODEL)]
CorpusDir = Annotated[
    str, typer.Option(callback=check_corpus, help="Folder with your .txt, .md, .rst and .py files.")
]
QuestionsFile = Annotated[
    Path | None, typer.Option(callback=check_file, help='JSONL, per line {"question", "chunks", "answer"}.')
]
OptionalCorpus = Annotated[
    str | None, typer.Option(callback=check_corpus, help="Folder of texts; see --questions or --log.")
]
Probes = Annotated[int, typer.Option(min=1, help="How many to make from the corpus.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Greatest size of a chunk.")]
CacheDir = Annotated[
    str | None,
    typer.Option(callback=check_cache, help="Cache folder; default: ragcachekit in the user's cache folder."),
]
DiskGb = Annotated[float | None, typer.Option(min=1e-9, max=1e9, help="Budget on disk in GB; default 68.7.")]
Namespace = Annotated[str, typer.Option(callback=_namespace, help="Tenant and corpus: a hard partition.")]
Budget = Annotated[
    float,
    typer.Option(
        callback=_budget,
        help="Nats per token of full's answer that may be lost, on average over questions.",
    ),
]

Policy = Annotated[
    str,
    typer.Option(
        callback=_policies,
        help="Which reused tokens are recomputed: full, prefix, reuse, lego:16, lego0, sensitive:0.1, "
        "impact:0.1, query:0.15, cacheblend:0.15, craft:1.0, budget:0.05 (after calibrate).",
    ),
]
Policies = Annotated[
    str | None,
    typer.Option(callback=_policies, help="With commas between; default: a list of all kinds."),
]
Encoder = Annotated[
    str | None,
    typer.Option(
        callback=_encoders,
        help="Context that chunks are encoded in: average:2 (the mean of two contexts, the default), "
        "standalone, sinks:4, system, similar:1 (that, and the chunk before it in its file).",
    ),
]
Encoders = Annotated[
    str,
    typer.Option(callback=_encoders, help="average:2,standalone,system, ...; standalone+int8: quantised."),
]
K = Annotated[int, typer.Option("-k", "--k", min=1, help="Chunks that are retrieved.")]
Tolerance = Annotated[
    float, typer.Option(min=0.0, help="Cosine distance up to which a question was asked before.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Length of an answer.")]
Device = Annotated[
    str | None, typer.Option(callback=_device, help="cpu, cuda, ...; default: a GPU if there is one.")
]
DeviceOrCpu = Annotated[str, typer.Option(callback=_device)]
Dtype = Annotated[str, typer.Option(callback=_dtype, help="auto (as saved), float32, bfloat16, float16.")]
Seed = Annotated[int, typer.Option(help="Of all that is drawn, and of bounds.")]
Json = Annotated[Path | None, typer.Option(callback=_json, help="Write machine, versions and all rows here.")]


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
