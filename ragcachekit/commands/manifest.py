"""Lists of what earlier runs of precompute encoded, so that what is gone from a corpus can be forgotten."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ragcachekit.errors import StoreError
from ragcachekit.files import replace_file

SCHEMA = 1
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.json")


@dataclass(frozen=True)
class Scope:
    """What one manifest is about; ``corpus`` is the folder, resolved."""

    namespace: str
    corpus: str
    encoder: str
    fingerprint: str
    chunk_tokens: int

    @property
    def name(self) -> str:
        """File name; those of one namespace share a prefix."""
        return f"{_prefix(self.namespace)}-{_digest(json.dumps(asdict(self), sort_keys=True))}.json"


@dataclass(frozen=True)
class Encoded:
    """Ids of chunks and their tokens; ``notes`` name manifests that could not be read."""

    chunks: Mapping[str, int]
    notes: tuple[str, ...]


def read_manifests(folder: Path, scope: Scope) -> Encoded:
    """What the scope's manifest lists and no other one of its namespace."""
    own: dict[str, int] = {}
    elsewhere: set[str] = set()
    notes = []
    for path in sorted(manifests(folder, scope.namespace)):
        is_own = path.name == scope.name
        try:
            found = json.loads(path.read_text())
            chunks = dict(found["chunks"].items())
            if found["schema"] != SCHEMA or not all(type(count) is int for count in chunks.values()):
                raise ValueError(path)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            what = "is written anew" if is_own else "run precompute for its corpus again, or delete it"
            notes.append(f"nothing is forgotten this time: {path} is damaged; {what}")
            continue
        if is_own:
            own = chunks
        else:
            elsewhere |= chunks.keys()
    return Encoded({id: n for id, n in own.items() if id not in elsewhere}, tuple(notes))


def write_manifest(folder: Path, scope: Scope, chunks: Mapping[str, int]) -> None:
    """Replace the manifest of ``scope`` atomically; StoreError if it cannot be written."""
    text = json.dumps({"schema": SCHEMA, **asdict(scope), "chunks": dict(chunks)}, indent=0)
    try:
        replace_file(folder / scope.name, text)
    except OSError as error:
        raise StoreError(
            f"cannot note in {folder} what is encoded ({error.strerror}); free some space or choose "
            "another --cache"
        ) from error


def manifests(folder: Path, namespace: str | None = None) -> Iterator[Path]:
    """Manifests of one namespace, or of all."""
    files = folder.glob("*.json" if namespace is None else f"{_prefix(namespace)}-*.json")
    return (path for path in files if _NAME.fullmatch(path.name))


def _prefix(namespace: str) -> str:
    return _digest(namespace)[:16]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
