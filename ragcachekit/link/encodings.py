"""Encoders: what each chunk of a prompt is (or would be) encoded behind, and where that makes it exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragcachekit.model.encoder import Encoding
from ragcachekit.model.rope import Rope
from ragcachekit.types import ENCODING_PREFIX, KVKey, chunk_id

if TYPE_CHECKING:
    from ragcachekit.link.plan import TokenSegment

KNOWN = ("standalone", "sinks:4", "system")


@dataclass(frozen=True)
class Wanted:
    """A cacheable segment of a prompt: where it stands, its key, and whether reuse there is exact."""

    start: int
    token_ids: tuple[int, ...]
    key: KVKey
    encoding: Encoding
    exact: bool


class Encodings:
    """Names and keys of encodings under one encoder (design: encodings).

    Parameters
    ----------
    name : str
        ``standalone``: the chunk alone from position 0, no BOS. ``sinks:n``: behind n BOS tokens
        whose KV is dropped (EPIC section 5.4, n = 4). ``system``: behind the text before the
        prompt's first chunk (FusionRAG eq. 5).
    rope : Rope
        Says whether the prompt's length changes frequencies, which then become part of the key.
    bos : int or None
        The BOS token id.
    """

    def __init__(self, name: str, rope: Rope, bos: int | None) -> None:
        kind, colon, count = name.partition(":")
        if kind not in ("standalone", "sinks", "system") or bool(colon) != (kind == "sinks"):
            raise ValueError(f"unknown encoder {name!r}; known: {', '.join(KNOWN)}")
        self.sinks = 0
        if kind == "sinks":
            if not count.isdecimal() or int(count) < 1:
                raise ValueError(f"encoder {name!r}: sinks:n needs a number n >= 1")
            if bos is None:
                raise ValueError(f"encoder {name!r} needs a BOS token, and this tokenizer has none")
            self.sinks = int(count)
        self.name = name
        self._rope = rope
        self._bos = bos

    def wanted(self, segments: Sequence[TokenSegment], fingerprint: str, namespace: str) -> Iterator[Wanted]:
        """Every segment whose KV can come from the store, in order."""
        length = sum(len(segment.token_ids) for segment in segments)
        system = self._system(segments)
        start = 0
        for segment in segments:
            ids = segment.token_ids
            if ids and (segment.is_chunk or (start == 0 and system)):
                encoding, context = self._encoding(segment.is_chunk, start, system)
                behind = len(encoding.behind)
                yield Wanted(
                    start,
                    ids,
                    self.key(ids, encoding, context, fingerprint, namespace, length),
                    self._stretch(encoding, behind + len(ids), length),
                    exact=start == 0 or (encoding.name == "system" and behind == start),
                )
            start += len(ids)

    def encoding(self, system: tuple[int, ...] = ()) -> tuple[Encoding, tuple[tuple[int, ...], ...]]:
        """The encoding of a chunk that will not stand at position 0, and what is in its context."""
        return self._encoding(True, 1, system)

    def key(
        self,
        ids: Sequence[int],
        encoding: Encoding,
        context: Sequence[tuple[int, ...]],
        fingerprint: str,
        namespace: str,
        length: int,
    ) -> KVKey:
        """The store key of ``ids`` under ``encoding`` in prompts of ``length`` tokens."""
        name = encoding.name
        if self._rope.depends_on_length:
            name = f"{name}@{self._rope.regime(length)}"
        behind = tuple(chunk_id(c, namespace) for c in context)
        return KVKey(fingerprint, namespace, chunk_id(ids, namespace), name, behind)

    def _encoding(
        self, is_chunk: bool, start: int, system: tuple[int, ...]
    ) -> tuple[Encoding, tuple[tuple[int, ...], ...]]:
        if not is_chunk:
            return Encoding(ENCODING_PREFIX), ()
        if start == 0:
            # Nothing stands before it: whatever the encoder, its exact encoding is standalone.
            return Encoding("standalone"), ()
        if self.name == "system" and system:
            return Encoding("system", system), (system,)
        if self.sinks and self._bos is not None:
            return Encoding(self.name, (self._bos,) * self.sinks), ()
        return Encoding("standalone"), ()

    def _stretch(self, encoding: Encoding, width: int, length: int) -> Encoding:
        """Encode with the frequencies of the whole prompt, where they differ from the chunk's own."""
        if self._rope.depends_on_length and self._rope.regime(width) != self._rope.regime(length):
            return Encoding(encoding.name, encoding.behind, length)
        return encoding

    @staticmethod
    def _system(segments: Sequence[TokenSegment]) -> tuple[int, ...]:
        """The text before the first chunk; empty if there is no chunk or it stands first."""
        filled = [segment for segment in segments if segment.token_ids]
        if not any(segment.is_chunk for segment in filled) or filled[0].is_chunk:
            return ()
        return filled[0].token_ids
