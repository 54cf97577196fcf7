"""Lists of what ``precompute`` encoded, so that what is gone from a corpus can be forgotten."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragcachekit.errors import StoreError
from ragcachekit.files import replace_file

if TYPE_CHECKING:
    from ragcachekit.commands.workspace import OwnFiles
    from ragcachekit.engine.rag_cache import RagCache

_SCHEMA = 1
_MANIFEST = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.json")


class Manifest:
    """The list of what earlier runs encoded, so that what is gone from a corpus can be forgotten.

    ``scope`` says what the list is about; lists of one namespace share the beginning of their names.
    """

    def __init__(self, folder: Path, scope: Mapping[str, Any]) -> None:
        self._folder, self._scope = folder, scope
        prefix = _digest(scope["namespace"])[:16]
        self.path = folder / f"{prefix}-{_digest(json.dumps(scope, sort_keys=True))}.json"
        self._listed = dict[str, int]()

    @classmethod
    def of(cls, settings: OwnFiles, rag: RagCache, folder: Path, encoder: str) -> Manifest:
        scope = {
            "namespace": rag.namespace,
            "corpus": str(Path(settings.corpus).expanduser().resolve()),
            "encoder": encoder,
            "fingerprint": rag.fingerprint,
            "chunk_tokens": settings.chunk_tokens,
        }
        return cls(folder, scope)

    def replace(self, present: Mapping[str, int], *, keep_gone: bool) -> dict[str, int]:
        """Take what a corpus has now; returns what is gone from it, unless that is kept and stays listed."""
        earlier = self.read()
        gone = {i: n for i, n in earlier.items() if i not in present and not keep_gone}
        self._listed = {i: n for i, n in earlier.items() if i not in gone} | dict(present)
        return gone

    def read(self) -> dict[str, int]:
        """Ids and tokens of chunks that this list has and no other one of its namespace."""
        own, elsewhere = dict[str, int](), set[str]()
        for path in manifests(self._folder, self._scope["namespace"]):
            try:
                found = json.loads(path.read_text())
                chunks = {id: int(tokens) for id, tokens in found["chunks"].items()}
                if found["schema"] != _SCHEMA:
                    raise ValueError(path)
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise StoreError(
                    f"the list of chunks {path} is damaged; delete it: what is gone from its corpus then "
                    "stays stored until it is evicted"
                ) from error
            if path == self.path:
                own = chunks
            else:
                elsewhere |= chunks.keys()
        return {id: n for id, n in own.items() if id not in elsewhere}

    def write(self) -> None:
        """Replace the list atomically; StoreError if it cannot be written."""
        text = json.dumps({"schema": _SCHEMA, **self._scope, "chunks": self._listed}, indent=0)
        try:
            replace_file(self.path, text)
        except OSError as error:
            raise StoreError(
                f"cannot note in {self._folder} what is encoded ({error.strerror}); free some space or "
                "choose another --cache"
            ) from error


def manifests(folder: Path, namespace: str | None = None) -> list[Path]:
    """Manifests of one namespace, or of all."""
    files = folder.glob("*.json" if namespace is None else f"{_digest(namespace)[:16]}-*.json")
    return [path for path in files if _MANIFEST.fullmatch(path.name)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
