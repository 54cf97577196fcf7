"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcachekit.errors import RagCacheError

CorpusDir = Annotated[
    str, typer.Option("--corpus", help="Folder with your .txt, .md, .rst, .py and .html files.")
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", help="Folder of a Hugging Face model, a hub id, or 'reader' (small, included)."),
]
CacheDir = Annotated[
    str | None, typer.Option("--cache", help="Cache folder; default: ragcachekit in the user's cache folder.")
]
Policy = Annotated[
    str, typer.Option("--policy", help="Which reused tokens are recomputed: full, reuse, lego:16, lego0.")
]
Encoder = Annotated[
    str | None, typer.Option("--encoder", help="What chunks are encoded behind: standalone, sinks:4, system.")
]
Namespace = Annotated[str, typer.Option("--namespace", help="Tenant and corpus: a hard partition.")]
ChunkTokens = Annotated[int, typer.Option("--chunk-tokens", min=1, help="Greatest size of a chunk.")]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, ...; default: a GPU if there is one.")
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="auto (as the model was saved), float32, bfloat16, float16.")
]
DiskGb = Annotated[
    float | None, typer.Option("--disk-gb", help="Budget of the KV on disk in GB; default 68.7.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write machine, versions and all rows here.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw a picture here (.png, .svg, .pdf).")]


def model_given(name: str | None) -> str:
    """The model's name, or what to give."""
    if name is None:
        raise RagCacheError(
            "which model? Give --model with the folder of a Hugging Face model or a hub id, "
            "or --model reader for the small one that comes with the package (it reads the demo's world only)"
        )
    return name


def names(text: str) -> tuple[str, ...]:
    """What stands between the commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
