"""Chunks, segments, prompts and keys: frozen data, without torch. Checks of arguments."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from operator import index
from typing import Any, TypeVar

Ids = tuple[int, ...]
"""Token ids."""

ENCODING_PREFIX = "prefix"  # encoding of text at the very start of a prompt: exact wherever it is reused

DEFAULT_POLICY, DEFAULT_ENCODER = "sensitive:0.1", "average:2"
"""What ``auto`` stands for before its check, and what the commands take by default."""


def chunk_id(token_ids: Sequence[int], salt: str = "") -> str:
    """SHA-256, as hex, over the salt with its length and the token ids (little-endian 64 bit).

    Different salts (namespaces) never share an id.
    """
    raw = salt.encode()
    digest = hashlib.sha256(len(raw).to_bytes(8, "little") + raw)
    digest.update(array("q", token_ids).tobytes())
    return digest.hexdigest()


_ID_LENGTH = 64  # hex digits of SHA-256


def part_id(chunk_id: str, start: int, stop: int) -> str:
    """Name of the rows ``start`` to ``stop`` of a chunk, where a prompt has only these tokens of it."""
    return f"{chunk_id}:{start}:{stop}"


def whole_id(name: str) -> str:
    """The chunk id in a name that :func:`part_id` made; any other name itself."""
    return name[:_ID_LENGTH] if name[_ID_LENGTH : _ID_LENGTH + 1] == ":" else name


@dataclass(frozen=True)
class Segment:
    """A piece of a prompt, as text or as token ids: :class:`Text` or :class:`Chunk`."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given = [one for one in (self.text, self.token_ids, getattr(self, "id", None)) if one is not None]
        if len(given) != 1:
            raise ValueError(
                f"{type(self).__name__} needs exactly one of text=, token_ids= and (a Chunk) id="
            )
        if self.token_ids is not None:
            object.__setattr__(self, "token_ids", tuple(map(index, self.token_ids)))
        elif not isinstance(given[0], str):
            raise TypeError(f"text and id must be str, not {type(given[0]).__name__}")


@dataclass(frozen=True)
class Text(Segment):
    """Fixed text or the question: always computed, except an exact prefix at the prompt's start.

    ``split_special_tokens=True`` reads special-token strings in ``text`` as plain text, as in chunks.
    """

    split_special_tokens: bool = False


@dataclass(frozen=True)
class Chunk(Segment):
    """An immutable piece of retrieved text whose KV may be reused.

    ``id``, as :meth:`ragcachekit.RagCache.encode` returned it, stands for the text that was encoded. For
    ``retain`` seconds after each use, memory tiers rather evict other chunks.
    """

    id: str | None = None
    retain: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("retain", self.retain, kinds=SECONDS_OR_NONE)


@dataclass(frozen=True)
class Prompt:
    """A prompt as ordered segments; adjacent segments are concatenated as token ids, never as text.

    Examples
    --------
    >>> Prompt([Text("Answer from the context.\\n"), Chunk("Berlin is a city."), Text("\\nWhere?")])
    ... # doctest: +SKIP
    """

    segments: tuple[Segment, ...]

    def __init__(self, segments: Iterable[Segment]) -> None:
        parts = tuple(segments)
        for part in parts:
            if not isinstance(part, Text | Chunk):
                raise TypeError(f"a prompt holds Text and Chunk segments, not {type(part).__name__}")
        object.__setattr__(self, "segments", parts)


@dataclass(frozen=True)
class KVKey:
    """Identity of one stored KV entry.

    - ``fingerprint``: Digest of all that changes KV values (see ``ragcachekit.model.identity``).
    - ``namespace``: Tenant and corpus, a hard partition.
    - ``chunk_id``: SHA-256 of the token ids, salted with the namespace; of a part: :func:`part_id`.
    - ``encoding``: How the chunk was encoded: ``standalone``, ``sinks:4``, ``system``, ``prefix``; with a
      suffix ``@regime`` where RoPE frequencies depend on the prompt's length.
    - ``context``: Ids of the segments that the chunk was encoded after, in order. ``forget`` follows them.
    """

    fingerprint: str
    namespace: str
    chunk_id: str
    encoding: str = "standalone"
    context: tuple[str, ...] = ()

    def digest(self) -> str:
        """SHA-256 over all fields, as hex: the entry's name in every tier."""
        parts = (self.fingerprint, self.namespace, self.chunk_id, self.encoding, *self.context)
        raw = [part.encode() for part in parts]
        return hashlib.sha256(b"".join([len(r).to_bytes(8, "little") + r for r in raw])).hexdigest()


# -- names of encoders, checked before torch is imported ---------------------------------------------

KNOWN_ENCODERS = ("standalone", "sinks:4", "system", "similar:10", "average:2", "in-prompt")
DEFAULT_NEIGHBOURS = {"similar": 10, "average": 2}
"""Neighbours of encoders without a number; of ``similar`` from FusionRAG's top-n analysis."""


def encoder_name(name: str) -> str:
    """An encoder's name in full, as ``average:2`` of ``average``; ValueError for an unknown one."""
    kind, count = parse_encoder(name)
    return f"{kind}:{count}" if count else kind


def parse_encoder(name: str) -> tuple[str, int]:
    """``sinks:4`` to its kind and number, 0 for a kind without one; ValueError as :func:`encoder_name`."""
    kind, colon, count = name.partition(":")
    counts = kind in ("sinks", *DEFAULT_NEIGHBOURS)
    known = counts or kind in KNOWN_ENCODERS
    if not known or bool(colon) > counts or (kind == "sinks" and not colon):
        raise ValueError(f"unknown encoder {name!r}; known: {', '.join(KNOWN_ENCODERS)}")
    if not colon:
        return kind, DEFAULT_NEIGHBOURS.get(kind, 0)
    if not (count.isascii() and count.isdecimal()) or int(count) < 1:
        raise ValueError(f"encoder {name!r}: {kind}:n needs a number n >= 1")
    return kind, int(count)


# -- checks of arguments ---------------------------------------------------------------------------

_T = TypeVar("_T")

Kinds = type | tuple[type, ...]
WHOLE = "a whole number"
SECONDS_OR_NONE = (Real, type(None))
"""Types of a time that may be left out."""


def positive(name: str, value: int) -> int:
    """``value`` as an int; TypeError for what is no integer, ValueError for what is not positive."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value <= 0:
        raise ValueError(f"{name} must be > 0, got {value}")
    return int(value)


def check_type(name: str, value: object, kinds: Kinds, give: str) -> None:
    """Raise TypeError, with what to ``give``, unless ``value`` is one of ``kinds``.

    True and False are no numbers here; 4e9 is a whole number.
    """
    whole = kinds is Integral or (isinstance(kinds, tuple) and Integral in kinds)
    if whole and isinstance(value, float) and value.is_integer():
        return
    if isinstance(value, kinds) and (not isinstance(value, bool) or kinds is bool):
        return
    given = repr(value)
    shown = given if len(given) <= 80 else f"{given[:77]}..."
    raise TypeError(f"{name} must be {give}, got {shown} ({type(value).__name__})")


def several(items: Iterable[_T], what: str) -> list[_T]:
    """The items as a list; TypeError for one string, which would be taken for its letters."""
    if isinstance(items, str):
        raise TypeError(f"{what} must be a list of strings, not one string")
    check_type(what, items, Iterable, "a list")
    return list(items)


def strings(items: Iterable[str], what: str) -> list[str]:
    """As :func:`several`, but TypeError unless each is a string; of a document it names the text's field."""
    listed = several(items, what)
    for number, item in enumerate(listed):
        own = next((name for name in ("page_content", "get_content") if hasattr(item, name)), None)
        give = "a string" if own is None else f"a string; give the {type(item).__name__}'s {own}"
        check_type(f"{what}[{number}]", item, str, give)
    return listed


def check_number(
    name: str, value: Any, give: str = "a number of seconds", *, kinds: Kinds = Real, positive: bool = False
) -> None:
    """Raise TypeError as :func:`check_type`, ValueError unless ``value`` is finite and >= 0, or ``positive``.

    None is fine where ``kinds`` has its type. A time of NaN would never come: every comparison with it fails.
    """
    check_type(name, value, kinds, give)
    if value is not None and (not 0 <= value < inf or (positive and not value)):
        raise ValueError(f"{name} must be a finite number {'>' if positive else '>='} 0, got {value}")


def check_deadline(deadline: float | None) -> None:
    """TypeError or ValueError unless it is None or a finite number of seconds from now."""
    check_number("deadline", deadline, "seconds from now, or None", kinds=SECONDS_OR_NONE)
