"""An index on disk: a manifest with ids and digests, and the library's own file beside it.

Faiss and hnswlib load a file with a flipped bit without an error; here both files are verified first.
The data file is named by its SHA-256 and the manifest replaced last, so that a process that dies while
saving leaves the older index whole. A power failure may damage it, and loading then reports that.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ragcachekit.errors import RetrievalError
from ragcachekit.files import parse_json, read_regular, replace_file

DocumentId: TypeAlias = str | int

_FORMAT = 2


@dataclass(frozen=True)
class Manifest:
    """Kind, settings and ids of an index. ``ids`` are (label, id) pairs by label; ``state`` is the kind's."""

    kind: str
    dim: int
    metric: str
    options: dict[str, Any]
    next_label: int
    ids: tuple[tuple[int, DocumentId], ...]
    state: dict[str, int]


def write_index(path: Path, manifest: Manifest, write: Callable[[Path], None]) -> None:
    """Write both files; OSError if the folder or the disk does not allow it (nothing is lost then)."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        digest = _file_digest(temporary)
        os.replace(temporary, _data_path(path, digest))
        body = json.dumps({"format": _FORMAT, "data": digest, **asdict(manifest)}, sort_keys=True)
        checksum = hashlib.sha256(body.encode()).hexdigest()
        old = _data_digest(path)
        replace_file(path, f"{checksum}\n{body}\n")
    finally:
        temporary.unlink(missing_ok=True)
    if old not in (None, digest):
        _data_path(path, str(old)).unlink(missing_ok=True)


def read_index(path: Path) -> tuple[Manifest, Path]:
    """The verified manifest and the verified data file's path; RetrievalError for any damage."""
    body = _verified_body(path)
    digest = body.pop("data")
    if body.pop("format") != _FORMAT:
        raise RetrievalError(f"{path}: written by another version of the library; build the index anew")
    data = _data_path(path, digest)
    try:
        found = _file_digest(data)
    except OSError as error:
        raise RetrievalError(f"cannot read the index data {data}: {error}") from error
    if found != digest:
        raise RetrievalError(f"{data} is damaged (SHA-256 differs); build the index anew")
    body["ids"] = tuple((label, one) for label, one in body["ids"])
    return Manifest(**body), data


def _verified_body(path: Path) -> dict[str, Any]:
    try:
        checksum, _, text = read_regular(path).partition(b"\n")
    except OSError as error:
        raise RetrievalError(f"cannot read the index {path}: {error}") from error
    if hashlib.sha256(text.removesuffix(b"\n")).hexdigest().encode() != checksum:
        raise RetrievalError(f"{path} is damaged or no index (SHA-256 differs); build the index anew")
    try:
        body: dict[str, Any] = parse_json(text)
    except ValueError as error:
        raise RetrievalError(f"{path} is no index ({error}); build the index anew") from error
    return body


def _data_digest(path: Path) -> str | None:
    try:
        return str(_verified_body(path)["data"])
    except RetrievalError:  # none there yet, or not ours to clean up
        return None


def _data_path(path: Path, digest: str) -> Path:
    return path.with_name(f"{path.name}.{digest[:16]}.data")


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
