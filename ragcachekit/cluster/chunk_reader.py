"""The chunks of an HTTP request, read without a model."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from typing import Any

from ragcachekit.prompt.parser import PromptParser
from ragcachekit.server.contexts.store import NAME
from ragcachekit.types import chunk_id

HEADER = "x-ragcachekit-chunks"
"""Header with chunk ids and commas between them, for clients that know them."""

log = logging.getLogger(__name__)

_MOST_CHUNKS, _LONGEST_ID = 256, 128
_USUAL_TOKENS = 200  # of a chunk that is known by its id alone
_REMEMBERED = 4096  # texts whose ids are remembered

Headers = Mapping[str, str]
Fields = Mapping[str, Any]
Namespace = Callable[[Headers, Fields], str]
"""Gives a request's namespace from its headers, by lower-case names, and the fields of its body."""


class ChunkReader:
    """Reads chunk ids and token counts from requests of the server's API.

    Chunks are ``documents``, content parts with ``cache_control`` or ``prompt_cache_breakpoint``,
    ``chunk_ids``, and the ids in the header ``X-RagCacheKit-Chunks``. The name in ``cached_content`` counts
    as a chunk, and is the only one with a slash. What cannot be read has none: the server will say what is
    wrong with it.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        The model's.
    namespace : callable
        As :data:`Namespace`; its errors count as no chunks.
    """

    def __init__(self, tokenizer: Any, namespace: Namespace) -> None:
        self._parser, self._namespace = PromptParser(tokenizer), namespace
        self._known: dict[tuple[bytes, str], tuple[str, int]] = {}
        self._lock = Lock()

    def chunks(self, headers: Headers, body: bytes) -> dict[str, int]:
        """Ids of the request's chunks, with their tokens."""
        found = dict.fromkeys(_listed(headers.get(HEADER, "").split(",")), _USUAL_TOKENS)
        try:
            fields = json.loads(body) if body else {}
            if isinstance(fields, dict):
                found |= dict.fromkeys(_listed(fields.get("chunk_ids")), _USUAL_TOKENS)
                if NAME.fullmatch(name := fields.get("cached_content") or fields.get("cachedContent") or ""):
                    found[name] = _USUAL_TOKENS
                texts = list(_texts(fields))[:_MOST_CHUNKS]
                namespace = self._namespace(headers, fields) if texts else ""
                found |= dict(self._of_text(text, namespace) for text in texts)
        except Exception:  # the server refuses what is wrong; here it is only routed
            log.debug("no chunks could be read from a request", exc_info=True)
        return dict(list(found.items())[:_MOST_CHUNKS])

    def _of_text(self, text: str, namespace: str) -> tuple[str, int]:
        key = hashlib.sha256(text.encode()).digest(), namespace
        with self._lock:
            found = self._known.pop(key, None)
        if found is None:
            ids = self._parser.chunk_ids(text)
            found = chunk_id(ids, namespace), len(ids)
        with self._lock:
            self._known[key] = found
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        return found


def _listed(found: object) -> Iterator[str]:
    """What can be an id in a list."""
    if isinstance(found, list):
        ids = (one.strip() for one in found if isinstance(one, str))
        yield from (one for one in ids if 0 < len(one) <= _LONGEST_ID and "/" not in one)


def _texts(fields: Fields) -> Iterator[str]:
    """Texts of the documents and of the marked parts of messages."""
    for document in fields.get("documents") or ():
        if isinstance(document, str):
            yield document
        elif title := document.get("title"):
            yield f"{title}\n{document['text']}"
        else:
            yield document["text"]
    for message in fields.get("messages") or ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("cache_control") or part.get("prompt_cache_breakpoint"):
                yield part["text"]
