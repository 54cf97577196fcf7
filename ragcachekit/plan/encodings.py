"""Encoders: what each chunk of a prompt is (or would be) encoded behind, and where that makes it exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from ragcachekit.model.encoding import Encoding, Ids, InPromptEncoding, NeighbourEncoding
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.segments import TokenSegment, Wanted
from ragcachekit.types import ENCODING_PREFIX, KVKey, chunk_id

KNOWN = ("standalone", "sinks:4", "system", "similar:10", "in-prompt")
DEFAULT_NEIGHBOURS = 10
"""What ``similar`` means without a number: what FusionRAG's top-n analysis recommends."""

_ARGUMENT = {
    "standalone": "none",
    "sinks": "needed",
    "system": "none",
    "similar": "optional",
    "in-prompt": "none",
}

IN_PROMPT = "in-prompt"


class Encodings:
    """Names and keys of encodings under one encoder.

    Parameters
    ----------
    name : str
        ``standalone``: the chunk alone from position 0, no BOS. ``sinks:n``: behind n BOS tokens
        whose KV is dropped (EPIC section 5.4, n = 4). ``system``: behind the text before the
        prompt's first chunk (FusionRAG eq. 5). ``similar:n``: behind that text and up to n most similar
        other chunks, as many as fit into the context, the most similar one nearest (FusionRAG eq. 10);
        without any it is ``system``. ``in-prompt``: behind all that stands before it in the prompt that
        misses it (Cache-Craft).
    rope : Rope
        Says whether the prompt's length changes frequencies, which then become part of the key.
    bos : int or None
    neighbours : callable
        Token ids of a chunk to those of the chunks most similar to it, most similar first. Only asked
        under ``similar:n``.

    Raises
    ------
    ValueError
        For an unknown name or a bad number; for ``similar:n`` on a model whose rotation depends on
        the prompt's length.
    """

    def __init__(
        self,
        name: str,
        rope: Rope,
        bos: int | None,
        neighbours: Callable[[Ids], Sequence[Ids]] = lambda _: (),
    ) -> None:
        kind, count = _parse(name)
        if kind == "sinks" and bos is None:
            raise ValueError(f"encoder {name!r} needs a BOS token, and this tokenizer has none")
        if kind == "similar" and rope.depends_on_length:
            raise ValueError(
                f"encoder {name!r} places chunks behind others, and this model turns keys by other "
                "frequencies in longer prompts (longrope); use the encoder 'system' with it"
            )
        self.sinks = count if kind == "sinks" else 0
        self.similar = count if kind == "similar" else 0
        self.name = f"{kind}:{count}" if count else kind
        self._rope = rope
        self._bos = bos
        self._neighbours = neighbours

    @property
    def behind_system(self) -> bool:
        """Whether chunks are encoded behind the prompt's system text."""
        return self.name in ("system", IN_PROMPT) or self.similar > 0

    def wanted(self, segments: Sequence[TokenSegment], fingerprint: str, namespace: str) -> Iterator[Wanted]:
        """Every segment whose KV can come from the store, in order."""
        length = sum(len(segment.token_ids) for segment in segments)
        system = self.system_of(segments)
        start, before = 0, list[Ids]()
        names = list[str]()
        for segment in segments:
            ids = segment.token_ids
            if ids and (segment.is_chunk or (start == 0 and system)):
                encoding, context = self._encoding(ids if segment.is_chunk else None, start, system, before)
                behind = len(encoding.behind)
                # The ids of what stands before are known already: hashing it again for every chunk adds up.
                known = tuple(names) if encoding.name == IN_PROMPT else None
                yield Wanted(
                    start,
                    ids,
                    self.key(ids, encoding, context, fingerprint, namespace, length, known),
                    self._stretch(encoding, behind + len(ids), length),
                    exact=start == 0 or (encoding.name in ("system", IN_PROMPT) and behind == start),
                    before=tuple(names),
                )
            if ids:
                before.append(ids)
                names.append(chunk_id(ids, namespace))
            start += len(ids)

    def encoding(self, ids: Ids, system: Ids = ()) -> tuple[Encoding, tuple[Ids, ...]]:
        """The encoding of a chunk that will not stand at position 0, and what is in its context."""
        return self._encoding(ids, 1, system, (system,) if system else ())

    def key(
        self,
        ids: Sequence[int],
        encoding: Encoding,
        context: Sequence[Ids],
        fingerprint: str,
        namespace: str,
        length: int,
        behind: tuple[str, ...] | None = None,
    ) -> KVKey:
        """The store key of ``ids`` under ``encoding`` in prompts of ``length`` tokens.

        ``behind`` are the ids of ``context``, where they are known.
        """
        name = encoding.name
        if self._rope.depends_on_length:
            name = f"{name}@{self._rope.regime(length)}"
        if behind is None:
            behind = tuple(chunk_id(c, namespace) for c in context)
        return KVKey(fingerprint, namespace, chunk_id(ids, namespace), name, behind)

    def _encoding(
        self, chunk: Ids | None, start: int, system: Ids, before: Sequence[Ids]
    ) -> tuple[Encoding, tuple[Ids, ...]]:
        """Of a chunk, or (None) of the text at the prompt's start."""
        if chunk is None:
            return Encoding(ENCODING_PREFIX), ()
        if start == 0:
            # Nothing stands before it: whatever the encoder, its exact encoding is standalone.
            return Encoding("standalone"), ()
        if self.name == IN_PROMPT and before:
            behind = tuple(token for ids in before for token in ids)
            return InPromptEncoding(IN_PROMPT, behind, segments=tuple(map(len, before))), tuple(before)
        near = self._fitting(chunk, len(system)) if self.similar else ()
        if near:
            # An empty system text keeps its place: behind it a neighbour is not a system text.
            return NeighbourEncoding(self.name, system, neighbours=near), (system, *near)
        if self.behind_system and system:
            return Encoding("system", system), (system,)
        if self.sinks and self._bos is not None:
            return Encoding(self.name, (self._bos,) * self.sinks), ()
        return Encoding("standalone"), ()

    def _fitting(self, chunk: Ids, system: int) -> tuple[Ids, ...]:
        """Up to n neighbours, the most similar last, while all of it fits into the context."""
        others = (ids for ids in dict.fromkeys(self._neighbours(chunk)) if ids and ids != chunk)
        room = self._rope.context - system - len(chunk)
        near: list[Ids] = []
        for ids in islice(others, self.similar):
            room -= len(ids)
            if room < 0:
                break
            near.append(ids)
        return tuple(reversed(near))

    def _stretch(self, encoding: Encoding, width: int, length: int) -> Encoding:
        """Encode with the frequencies of the whole prompt, where they differ from the chunk's own."""
        if self._rope.depends_on_length and self._rope.regime(width) != self._rope.regime(length):
            return replace(encoding, length=length)
        return encoding

    @staticmethod
    def system_of(segments: Sequence[TokenSegment]) -> Ids:
        """The text before the first chunk; empty if there is no chunk or it stands first."""
        filled = [segment for segment in segments if segment.token_ids]
        if not any(segment.is_chunk for segment in filled) or filled[0].is_chunk:
            return ()
        return filled[0].token_ids


def _parse(name: str) -> tuple[str, int]:
    """``sinks:4`` to its kind and number; 0 where the kind has none."""
    kind, colon, count = name.partition(":")
    argument = _ARGUMENT.get(kind)
    if argument is None or (colon and argument == "none") or (not colon and argument == "needed"):
        raise ValueError(f"unknown encoder {name!r}; known: {', '.join(KNOWN)}")
    if not colon:
        return kind, DEFAULT_NEIGHBOURS if kind == "similar" else 0
    if not (count.isascii() and count.isdecimal()) or int(count) < 1:
        raise ValueError(f"encoder {name!r}: {kind}:n needs a number n >= 1")
    return kind, int(count)
