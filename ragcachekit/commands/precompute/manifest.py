"""What earlier runs of precompute encoded, so that what is gone from a corpus can be forgotten."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ragcachekit.errors import StoreError

SCHEMA = 1
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.json")


class ManifestDamaged(Exception):
    """A manifest holds something else than was written."""


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
        """File name: those of one namespace begin alike."""
        return f"{_prefix(self.namespace)}-{_digest(json.dumps(asdict(self), sort_keys=True))}.json"


@dataclass(frozen=True)
class Known:
    """What manifests say about one scope.

    ``chunks`` are ids of its earlier runs with their tokens, ``elsewhere`` ids that other manifests of the
    namespace list; ``notes`` say what could not be read, and then nothing may be forgotten.
    """

    chunks: Mapping[str, int]
    elsewhere: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())

    def gone(self, present: Mapping[str, int]) -> dict[str, int]:
        """What is to be forgotten, and its tokens, if ``present`` is the corpus now."""
        if self.notes:
            return {}
        return {id: n for id, n in self.chunks.items() if id not in present and id not in self.elsewhere}


def read_manifests(folder: Path, scope: Scope) -> Known:
    """Read the manifest of ``scope`` and those beside it; changes nothing."""
    chunks: Mapping[str, int] = {}
    elsewhere: set[str] = set()
    notes = []
    for path in sorted(manifests(folder, scope.namespace)):
        own = path.name == scope.name
        try:
            found = _read(path)
        except ManifestDamaged as error:
            what = "is written anew" if own else "run precompute for its corpus again, or delete it"
            notes.append(f"nothing is forgotten this time: {path} {error}; {what}")
            continue
        if own:
            chunks = found
        else:
            elsewhere |= found.keys()
    return Known(chunks, frozenset(elsewhere), tuple(notes))


def write_manifest(folder: Path, scope: Scope, chunks: Mapping[str, int]) -> None:
    """Replace the manifest of ``scope`` as a whole: after a crash it is the old or the new one.

    Raises StoreError if it cannot be written.
    """
    text = json.dumps({"schema": SCHEMA, **asdict(scope), "chunks": dict(chunks)}, indent=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".", suffix=".tmp", delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, folder / scope.name)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise StoreError(
            f"cannot note in {folder} what is encoded ({error.strerror}); free some space or choose "
            "another --cache"
        ) from error


def manifests(folder: Path, namespace: str | None = None) -> Iterator[Path]:
    """Files of one namespace, or of all; nothing that another wrote into the folder."""
    files = folder.glob("*.json" if namespace is None else f"{_prefix(namespace)}-*.json")
    return (path for path in files if _NAME.fullmatch(path.name))


def _read(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_text())
        chunks = found["chunks"]
        whole = found["schema"] == SCHEMA and all(type(count) is int for count in chunks.values())
    except OSError as error:
        raise ManifestDamaged(f"cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ManifestDamaged("is damaged") from error
    if not whole:
        raise ManifestDamaged(f"is not of schema {SCHEMA}")
    return dict(chunks)


def _prefix(namespace: str) -> str:
    return _digest(namespace)[:16]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
