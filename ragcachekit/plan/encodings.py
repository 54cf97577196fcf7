"""Segments of a tokenised prompt, and their encodings: contexts, keys, and where they are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from ragcachekit.model.encoding import AverageEncoding, Encoding, InPromptEncoding, NeighbourEncoding
from ragcachekit.model.rope import Rope
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.types import ENCODING_PREFIX, Ids, KVKey, chunk_id, whole_id

KNOWN = ("standalone", "sinks:4", "system", "similar:10", "average:3", "in-prompt")
DEFAULT_NEIGHBOURS = {"similar": 10, "average": 3}
"""Neighbours of encoders without a number; of ``similar`` from FusionRAG's top-n analysis."""

IN_PROMPT = "in-prompt"

_ARGUMENT = {
    "standalone": "none",
    "sinks": "needed",
    "system": "none",
    "similar": "optional",
    "average": "optional",
    IN_PROMPT: "none",
}


@dataclass(frozen=True)
class Wanted:
    """A cacheable segment of a prompt; ``exact``: its KV is exact at ``start``.

    ``before`` are the ids of all preceding segments, texts too, in order. Where the encoder is
    ``average:n``: ``average`` is the key of the chunk's mean KV after any chunks, ``plain`` that of its KV
    after the system text alone, and ``in_place`` that of the rows that this prompt computes if it must.
    Of a chunk that is in the prompt in part, ``whole`` is all of it: its rows from number ``first`` on
    serve as well, and it is what is encoded.
    """

    start: int
    token_ids: Ids
    key: KVKey
    encoding: Encoding
    exact: bool
    before: tuple[str, ...] = ()
    average: KVKey | None = None
    plain: KVKey | None = None
    in_place: KVKey | None = None
    whole: Wanted | None = None
    first: int = 0

    @property
    def to_encode(self) -> Wanted:
        """All of the chunk, which serves at any place; of rows that are exact here, just these."""
        if self.whole is None or self.exact or isinstance(self.encoding, InPromptEncoding):
            return self
        return self.whole


class _Place(NamedTuple):
    """What precedes a segment in its prompt of ``length`` tokens."""

    start: int
    length: int
    system: Ids
    names: Sequence[str]
    fingerprint: str
    namespace: str


class Encodings:
    """Names and keys of encodings under one encoder.

    ValueError for an unknown name or a bad number; for ``similar:n`` and ``average:n`` where frequencies
    depend on the length.

    Parameters
    ----------
    name : str
        ``standalone``: the chunk alone from position 0, no BOS. ``sinks:n``: after n BOS tokens whose KV is
        dropped (EPIC section 5.4, n = 4). ``system``: after the text before the first chunk (FusionRAG eq.
        5). ``similar:n``: after that text and up to n similar chunks that fit, the most similar one last
        (FusionRAG eq. 10). ``average:n``: the mean of n encodings, after that text and one, two, ... n of n
        other chunks; the first chunk of a prompt is encoded after that text alone, which is exact there.
        ``in-prompt``: after all that precedes it in the prompt (Cache-Craft).
    rope : Rope
        Frequencies that depend on the prompt's length become part of the key.
    bos : int or None
    neighbours : callable
        For ``similar:n`` and ``average:n``: token ids of a chunk to those of others, most similar first.
    joint : tuple of int
        Token ids between neighbours and the chunk, as prompts have them between chunks.
    """

    def __init__(
        self,
        name: str,
        rope: Rope,
        bos: int | None,
        neighbours: Callable[[Ids], Sequence[Ids]] = lambda _: (),
        joint: Ids = (),
    ) -> None:
        kind, count = _parse(name)
        if kind == "sinks" and bos is None:
            raise ValueError(f"encoder {name!r} needs a BOS token, and this tokenizer has none")
        if kind in DEFAULT_NEIGHBOURS and rope.depends_on_length:
            raise ValueError(
                f"encoder {name!r} places chunks behind others, and this model turns keys by other "
                "frequencies in longer prompts (longrope); use the encoder 'system' with it"
            )
        self.sinks = count if kind == "sinks" else 0
        self.neighbours = count if kind in DEFAULT_NEIGHBOURS else 0
        self.averages = kind == "average"
        self.name = f"{kind}:{count}" if count else kind
        self._rope = rope
        self._bos = bos
        self._near = neighbours
        self._joint = joint

    @property
    def needs_system(self) -> bool:
        """Whether chunks are encoded after the prompt's system text."""
        return self.name in ("system", IN_PROMPT) or self.neighbours > 0

    def wanted(self, segments: Sequence[TokenSegment], fingerprint: str, namespace: str) -> Iterator[Wanted]:
        """Every segment whose KV can come from the store, in order."""
        length = sum(len(segment.token_ids) for segment in segments)
        system = self.system_of(segments)
        start, before = 0, list[Ids]()
        names = list[str]()
        for segment in segments:
            ids = segment.token_ids
            if not ids:
                continue
            name = segment.name(namespace)
            if segment.is_chunk or (start == 0 and system):
                place = _Place(start, length, system, names, fingerprint, namespace)
                encoding, context = self._encoding(
                    (segment.own or ids) if segment.is_chunk else None, start, system, before
                )
                want = self._wanted(ids, name, encoding, context, place)
                if segment.own:
                    whole = self._wanted(segment.own, whole_id(name), encoding, context, place)
                    # Of rows computed after tokens that the prompt does not have, none is exact.
                    whole = replace(whole, exact=whole.exact and not segment.first)
                    want = replace(want, whole=whole, first=segment.first)
                yield want
            before.append(ids)
            names.append(name)
            start += len(ids)

    def _wanted(
        self, ids: Ids, name: str, encoding: Encoding, context: tuple[Ids, ...], place: _Place
    ) -> Wanted:
        """A segment with its key; ``name`` is its id."""
        rope, start, names = self._rope, place.start, tuple(place.names)
        width = len(encoding.before)
        # The ids of preceding segments: hashing them again for every chunk adds up.
        known = names if encoding.name == IN_PROMPT else None
        key = self.key(ids, encoding, context, place.fingerprint, place.namespace, place.length, known, name)
        if rope.depends_on_length and rope.regime(width + len(ids)) != rope.regime(place.length):
            encoding = replace(encoding, length=place.length)  # the whole prompt's frequencies
        exact = start == 0 or (encoding.name in ("system", IN_PROMPT) and width == start)
        want = Wanted(start, ids, key, encoding, exact, names)
        if self.averages and start:
            want = self._with_alternatives(want, place.system, place.length)
        return want

    def encoding(self, ids: Ids, system: Ids = ()) -> tuple[Encoding, tuple[Ids, ...]]:
        """The encoding of a chunk that is not at position 0, and the token ids of its context."""
        return self._encoding(ids, None, system, (system,) if system else ())

    def key(
        self,
        ids: Sequence[int],
        encoding: Encoding,
        context: Sequence[Ids],
        fingerprint: str,
        namespace: str,
        length: int,
        context_ids: tuple[str, ...] | None = None,
        name_of_ids: str | None = None,
    ) -> KVKey:
        """The store key of ``ids`` under ``encoding`` in prompts of ``length`` tokens.

        ``context_ids`` are those of ``context`` and ``name_of_ids`` that of ``ids``, if they are known.
        """
        name = encoding.name
        if self._rope.depends_on_length:
            name = f"{name}@{self._rope.regime(length)}"
        if context_ids is None:
            context_ids = tuple(chunk_id(c, namespace) for c in context)
        return KVKey(fingerprint, namespace, name_of_ids or chunk_id(ids, namespace), name, context_ids)

    def _with_alternatives(self, want: Wanted, system: Ids, length: int) -> Wanted:
        """What else may serve, and the name of the prompt's own rows."""
        key, behind = want.key, chunk_id(system, want.key.namespace)
        want = replace(want, average=replace(key, encoding=self.name, context=(behind,)))
        if want.exact:
            return want
        if isinstance(want.encoding, AverageEncoding):
            plain, context = system_encoding(system), (system,) if system else ()
            own = self.key(
                want.token_ids, plain, context, key.fingerprint, key.namespace, length, None, key.chunk_id
            )
            want = replace(want, plain=own)
        # The system text stays first, even if it is empty.
        behind_these = (behind, *(want.before[1:] if system else want.before))
        return replace(want, in_place=replace(key, encoding=self.name, context=behind_these))

    def _encoding(
        self, chunk: Ids | None, start: int | None, system: Ids, before: Sequence[Ids]
    ) -> tuple[Encoding, tuple[Ids, ...]]:
        """Encoding of a chunk (``start`` None: at no certain place), or of the text at the prompt's start."""
        if chunk is None:
            return Encoding(ENCODING_PREFIX), ()
        if start == 0:
            # Without any context, its exact encoding is standalone, whatever the encoder.
            return Encoding("standalone"), ()
        if self.name == IN_PROMPT and before:
            behind = tuple(token for ids in before for token in ids)
            return InPromptEncoding(IN_PROMPT, behind, segments=tuple(map(len, before))), tuple(before)
        is_first = self.averages and start == len(system)
        near = self._fitting(chunk, len(system)) if self.neighbours and not is_first else ()
        # An empty system text stays first in the key: else a neighbour would pass for one.
        if near and self.averages:
            return AverageEncoding(self.name, system, 0, near, self._joint), (system, *near)
        if near:
            return NeighbourEncoding(self.name, system, 0, near, self._joint), (system, *near)
        if self.needs_system and system:
            return system_encoding(system), (system,)
        if self.sinks and self._bos is not None:
            return Encoding(self.name, (self._bos,) * self.sinks), ()
        return Encoding("standalone"), ()

    def _fitting(self, chunk: Ids, system: int) -> tuple[Ids, ...]:
        """Up to n neighbours that fit into the model's context, the most similar last."""
        others = (ids for ids in dict.fromkeys(self._near(chunk)) if ids and ids != chunk)
        room = self._rope.context - system - len(chunk)
        near: list[Ids] = []
        for ids in islice(others, self.neighbours):
            room -= len(ids) + len(self._joint)
            if room < 0:
                break
            near.append(ids)
        return tuple(near if self.averages else reversed(near))

    @staticmethod
    def system_of(segments: Sequence[TokenSegment]) -> Ids:
        """The text before the first chunk; empty if there is none."""
        filled = [segment for segment in segments if segment.token_ids]
        if not any(segment.is_chunk for segment in filled) or filled[0].is_chunk:
            return ()
        return filled[0].token_ids


def system_encoding(system: Ids) -> Encoding:
    """The encoding after a system text alone; ``standalone`` without one."""
    return Encoding("system", system) if system else Encoding("standalone")


def _parse(name: str) -> tuple[str, int]:
    """``sinks:4`` to its kind and number, 0 for a kind without one."""
    kind, colon, count = name.partition(":")
    argument = _ARGUMENT.get(kind)
    if argument is None or (colon and argument == "none") or (not colon and argument == "needed"):
        raise ValueError(f"unknown encoder {name!r}; known: {', '.join(KNOWN)}")
    if not colon:
        return kind, DEFAULT_NEIGHBOURS.get(kind, 0)
    if not (count.isascii() and count.isdecimal()) or int(count) < 1:
        raise ValueError(f"encoder {name!r}: {kind}:n needs a number n >= 1")
    return kind, int(count)
