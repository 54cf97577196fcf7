"""Text to token ids: prompts as the user's own code tokenises them, chunks, and special tokens in both."""

from __future__ import annotations

import copy
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from ragcachekit.types import Chunk, Ids, Segment, Text

Span = tuple[int, int]

_FOLLOWED_BY = ("A", "1", "(")  # what chunks begin with; tokens before them that depend on it are not stable
MAX_TEXTS = 1024  # per namespace, those registered or retrieved last
MAX_KNOWN = 1024  # chunks whose ids are kept: those of a prompt are asked for each time
MAX_COMPARISONS = 1 << 16  # occurrences times texts; beyond that every occurrence is plain text
WINDOW = 16  # characters compared before and after an occurrence, without whitespace and special tokens
ENOUGH = 10  # characters in common, before and after together, that decide; role names have fewer

_PROBE = {"name": "zq7xprobe", "description": "", "parameters": {"type": "object", "properties": {}}}


class PromptTokens(NamedTuple):
    """A tokenised text.

    ``offsets`` are the characters ``(start, end)`` of each token, None where a slow tokenizer gives none.
    ``plain`` counts special-token strings of documents that are read as plain text.
    """

    ids: Ids
    offsets: list[Span] | None = None
    plain: int = 0


class PromptTokenizer:
    """Tokenises prompts and chunks with private copies of the user's tokenizer.

    Copies, because a fast tokenizer's special-token setting is its state. Special tokens in chunks are plain
    text. Chunks get no leading space from tokenizers that mark word starts (Llama 2, T5): they are encoded
    after a newline that is cut off.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._copies = {plain: (copy.deepcopy(tokenizer), threading.Lock()) for plain in (False, True)}
        self.chunk = lru_cache(MAX_KNOWN)(self._chunk)
        self._gives_offsets = bool(getattr(tokenizer, "is_fast", False))
        newline, a = self._encode("\n").ids, self._encode("a").ids
        spaced = self._encode("\na").ids != newline + a
        # The letter is for text that begins with a newline: there may be a token for two of them.
        self._after = (("\n", newline), ("a", a)) if spaced else ()
        self.bos: int | None = tokenizer.bos_token_id
        whole = self._encode("a", special=True).ids
        at = next((i for i in range(len(whole)) if whole[i : i + len(a)] == a), 0)
        self.leading = whole[:at]
        added = tokenizer.added_tokens_decoder.values()
        self.special_tokens = frozenset(
            [*tokenizer.all_special_tokens, *(token.content for token in added if token.special)]
        )
        self._special_ids = frozenset(tokenizer.convert_tokens_to_ids(sorted(self.special_tokens)))
        self._special = any_of(self.special_tokens)

    @property
    def pad(self) -> int:
        """Id for padding; the model never reads it."""
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(int(token) for token in ids if token is not None)

    def text(self, text: str, *, first: bool = False) -> Ids:
        """Ids of fixed text; ``first`` for the start of a prompt. No BOS is added."""
        return (self._encode(text) if first else self._continued(text)).ids

    def plain(self, text: str) -> Ids:
        """Ids of text in which special-token strings are plain text."""
        ids = self._continued(text, plain=True).ids
        if self._special_ids.isdisjoint(ids) or not self._special.search(text):
            return ids
        # Some slow tokenizers keep such a string whole even so: not if it comes in two pieces.
        cuts = [0, *(match.start() + 1 for match in self._special.finditer(text)), len(text)]
        pieces = [text[start:stop] for start, stop in pairwise(cuts)]
        return tuple(i for piece in pieces for i in self._continued(piece).ids)

    def _chunk(self, text: str) -> Ids:
        """Ids of a chunk in a prompt, without last tokens that would run into a blank line after it."""
        alone = self.plain(text)
        stable = common_prefix(alone, self.plain(text + "\n\nA"))
        return stable if 2 * len(stable) >= len(alone) else alone

    def before_chunk(self, text: str, *, special: bool) -> Ids:
        """Ids of the text before a prompt's first chunk that are the same whatever the chunk begins with.

        ``special``: with what the tokenizer puts in front of plain text (BOS).
        """
        if not text:
            return self.leading if special else ()
        return common_prefix(*(self._encode(text + end, special=special).ids for end in _FOLLOWED_BY))

    def blank_line(self) -> Ids:
        whole, a = self.text("a\n\na", first=True), self.text("a", first=True)
        between, last = whole[len(a) :], self.text("a")
        return between[: len(between) - len(last)] if between[-len(last) :] == last else self.text("\n\n")

    def prompt(self, text: str, *, special: bool, apart: Sequence[Span] = ()) -> PromptTokens | None:
        """Tokenise a whole prompt as ``tokenizer(text)`` does, or (not ``special``) a rendered chat.

        ``apart`` are the characters of texts in which special-token strings are plain text. There the ids
        are not those of ``tokenizer(text)``: up to the next special tokens outside of ``apart``, they are
        those of text without special tokens. None if a slow tokenizer would have to tell them apart.
        """
        found = self._encode(text, special=special, offsets=True)
        if not apart or not any(_meets(match.span(), apart) for match in self._special.finditer(text)):
            return found
        return None if found.offsets is None else self._with_plain(text, found.ids, found.offsets, apart)

    def _with_plain(
        self, text: str, ids: Ids, offsets: Sequence[Span], apart: Sequence[Span]
    ) -> PromptTokens:
        """The prompt with special tokens in ``apart`` as plain text."""
        control = [n for n, token in enumerate(ids) if token in self._special_ids]
        documents = [n for n in control if offsets[n][1] > offsets[n][0] and _meets(offsets[n], apart)]
        kept = [n for n in control if n not in documents]
        out, places, done = list[int](), list[Span](), 0
        for number in documents:
            if number < done:
                continue
            low = max((n for n in kept if n < number), default=-1)
            high = min((n for n in kept if n > number), default=len(ids))
            start = offsets[low][1] if low >= 0 else 0
            stop = offsets[high][0] if high < len(ids) and offsets[high][1] else len(text)
            encode = self._encode if start == 0 else self._continued
            plain = encode(text[start:stop], plain=True, offsets=True)
            out += [*ids[done : low + 1], *plain.ids]
            places += [*offsets[done : low + 1], *((a + start, b + start) for a, b in plain.offsets or ())]
            done = high
        return PromptTokens((*out, *ids[done:]), [*places, *offsets[done:]], len(documents))

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ``ids``, without special tokens unless asked, and without clean-up, which changes it."""
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(ids), **options))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Apply the chat template, with the generation prompt; ValueError if the tokenizer has none."""
        if not self.tokenizer.chat_template:
            raise ValueError("this tokenizer has no chat template; give the prompt as a string")
        plain, options = [dict(message) for message in messages], {"tools": list(tools)} if tools else {}
        return str(
            self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True, **options)
        )

    @property
    def renders_tools(self) -> bool:
        """Whether the chat template shows the tools that it is given, tried out by rendering one."""
        try:
            text = self.render([{"role": "user", "content": "a"}], [{"type": "function", "function": _PROBE}])
        except Exception:  # no template, or one that fails on tools
            return False
        return str(_PROBE["name"]) in text

    def _continued(self, text: str, *, plain: bool = False, offsets: bool = False) -> PromptTokens:
        """Text as it is tokenised after other text."""
        for mark, after in (*(self._after if text else ()), ("", Ids())):
            found = self._encode(mark + text, plain=plain, offsets=offsets)
            if found.ids[: len(after)] == after:
                break
        places = found.offsets and [(a - len(mark), b - len(mark)) for a, b in found.offsets[len(after) :]]
        return PromptTokens(found.ids[len(after) :], places)

    def _encode(
        self, text: str, *, special: bool = False, plain: bool = False, offsets: bool = False
    ) -> PromptTokens:
        """One call of the tokenizer; ``plain``: special-token strings are plain text."""
        offsets = offsets and self._gives_offsets
        if not text:
            return PromptTokens((), [] if offsets else None)
        tokenizer, lock = self._copies[plain]
        options = {"add_special_tokens": special, "return_offsets_mapping": offsets}
        options |= {"split_special_tokens": True} if plain else {}
        with lock:  # verbose=False: no warning for a document longer than the context
            found = tokenizer(without_lone_surrogates(text), verbose=False, **options)
        places = [(int(a), int(b)) for a, b in found.offset_mapping] if offsets else None
        return PromptTokens(tuple(found.input_ids), places)


def common_prefix(*several: Sequence[int]) -> Ids:
    """The tokens with which all begin."""
    length = 0
    for column in zip(*several, strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return tuple(several[0][:length])


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common beginning, by bisection: comparing slices takes no loop over characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _meets(span: Span, others: Sequence[Span]) -> bool:
    return any(span[0] < end and start < span[1] for start, end in others)


def without_lone_surrogates(text: str) -> str:
    """Text with U+FFFD for lone surrogates, which make tokenizers raise."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class _HeldToken(NamedTuple):
    """Places of one special token in a text, the text before the last and the text after the first."""

    before: str
    after: str
    places: frozenset[tuple[str, str]]

    def may_be(self, left: str, right: str) -> bool:
        """Whether an occurrence between these characters may be one of the text's."""
        # On one side: lines between may have been dropped, and everything beyond the other side.
        if (len(left) == WINDOW and left in self.before) or (len(right) == WINDOW and right in self.after):
            return True
        # Half of a few characters is enough.
        same = [
            (
                common_length(left[::-1], own_left[::-1]) + common_length(right, own_right),
                own_left + own_right,
            )
            for own_left, own_right in self.places
        ]
        return any(count >= ENOUGH or 2 * count >= len(own) for count, own in same)


_Held = dict[str, _HeldToken]  # by the special token, folded


class SpecialTokenTexts:
    """The retrieved texts with special-token strings in them, per namespace. Thread safe.

    Such a string is plain text wherever the text is in a prompt. A chunk that is found is tokenised without
    special tokens anyway; a document that a chain cut, re-cased or joined to other text is fixed text, as the
    template's own control tokens are.
    """

    def __init__(self, special_tokens: Iterable[str] = ()) -> None:
        strings = {s for s in special_tokens if _fold(s)}
        self._exact = any_of(strings)
        self._folded = re.compile(f"({any_of(map(_fold, strings)).pattern})")
        # Nearly no text has one: most are searched for their first characters only.
        self._firsts = {c for s in strings for c in (s.lstrip()[0].lower(), s.lstrip()[0].upper())}
        self._lock = threading.Lock()
        self._namespaces: dict[str, OrderedDict[str, _Held]] = {}
        self._seen: dict[str, set[str]] = {}  # strings; they stay when their texts are forgotten or evicted

    def add(self, namespace: str, texts: Iterable[str]) -> None:
        """Add those of the texts that have a special-token string, in any case and spacing."""
        for text in texts:
            if held := self._held(text):
                with self._lock:
                    self._seen.setdefault(namespace, set()).update(held)
                    known = self._namespaces.setdefault(namespace, OrderedDict())
                    known[text.strip()] = held
                    known.move_to_end(text.strip())
                    if len(known) > MAX_TEXTS:
                        known.popitem(last=False)

    def forget(self, namespace: str, texts: Iterable[str] | None) -> None:
        """Forget these texts (None: all); the special-token strings that they had stay known."""
        with self._lock:
            known = self._namespaces.get(namespace, OrderedDict())
            for text in list(known) if texts is None else texts:
                known.pop(text.strip(), None)

    def split(
        self, namespace: str, segments: Sequence[Segment], retrieved: Iterable[str] = ()
    ) -> list[Segment]:
        """Cut fixed text at the special-token strings that may come from a retrieved text.

        Plain text is what such a text has, too, with about the same characters before or after it.
        ``retrieved`` are texts of this prompt alone.
        """
        with self._lock:
            known = list(self._namespaces.get(namespace, {}).values())
        known += filter(None, map(self._held, retrieved))
        if not known:
            return list(segments)
        folded, occurrences = self._occurrences(segments)
        crowded = len(occurrences) * len(known) > MAX_COMPARISONS
        plain: dict[int, list[tuple[int, int]]] = {}
        for number, span, special, at in occurrences:
            around = folded[max(at - WINDOW, 0) : at], folded[at : at + WINDOW]
            found = (held[special] for held in known if special in held)
            if any(crowded or token.may_be(*around) for token in found):
                plain.setdefault(number, []).append(span)
        return [
            piece
            for number, segment in enumerate(segments)
            for piece in (_cut(segment.text or "", plain[number]) if number in plain else [segment])
        ]

    def split_contents(
        self, namespace: str, contents: Sequence[Sequence[Segment]], retrieved: Iterable[str] = ()
    ) -> list[list[Segment]]:
        """Cut contents of chat messages at every special-token string that a retrieved text ever had.

        Control tokens come from the chat template alone, so nothing around an occurrence is compared.
        """
        with self._lock:
            held = set(self._seen.get(namespace, ()))
        held |= {special for text in retrieved for special in self._held(text)}
        if not held:
            return [list(content) for content in contents]

        def pieces(segment: Segment) -> list[Segment]:
            text = segment.text or ""
            spans = [m.span() for m in self._exact.finditer(text) if _fold(m[0]) in held]
            return _cut(text, spans) if not is_read_apart(segment) else [segment]

        return [[piece for segment in content for piece in pieces(segment)] for content in contents]

    def _held(self, text: str) -> _Held:
        """The special tokens of a text and what is around them."""
        if not any(first in text for first in self._firsts):
            return {}
        # Odd pieces are special tokens, the others what is between them.
        pieces = self._folded.split(_fold(text))
        whole, places, at = "".join(pieces[::2]), dict[str, list[int]](), 0
        for run, special in zip(pieces[::2], pieces[1::2], strict=False):
            at += len(run)
            places.setdefault(special, []).append(at)
        return {
            special: _HeldToken(
                whole[: where[-1]],
                whole[where[0] :],
                frozenset((whole[max(at - WINDOW, 0) : at], whole[at : at + WINDOW]) for at in where),
            )
            for special, where in places.items()
        }

    def _occurrences(
        self, segments: Sequence[Segment]
    ) -> tuple[str, list[tuple[int, tuple[int, int], str, int]]]:
        """The prompt without whitespace, case and special-token strings; and those of its fixed text.

        Each with the number of its segment, its place there, its folded form and its place in the former.
        """
        runs, found, length = list[str](), list[tuple[int, tuple[int, int], str, int]](), 0
        for number, segment in enumerate(segments):
            text, done = segment.text or "", 0
            for match in self._exact.finditer(text):
                runs.append(_fold(text[done : match.start()]))
                length, done = length + len(runs[-1]), match.end()
                if not is_read_apart(segment):
                    found.append((number, match.span(), _fold(match[0]), length))
            runs.append(_fold(text[done:]))
            length += len(runs[-1])
        return "".join(runs), found


def is_read_apart(segment: Segment) -> bool:
    """Whether the segment is a chunk, or text whose special-token strings are plain text."""
    return isinstance(segment, Chunk) or (isinstance(segment, Text) and segment.split_special_tokens)


def plain_count(segments: Iterable[Segment]) -> int:
    """Number of segments that are fixed text tokenised without special tokens."""
    return sum(isinstance(s, Text) and s.split_special_tokens for s in segments)


def any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """A pattern of these strings, the longest first, as tokenizers take them."""
    longest_first = sorted(set(filter(None, strings)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # which matches nothing


def _cut(text: str, spans: Iterable[tuple[int, int]]) -> list[Segment]:
    pieces: list[Segment] = []
    done = 0
    for start, end in spans:
        pieces += [Text(text[done:start]), Text(text[start:end], split_special_tokens=True)]
        done = end
    return [piece for piece in (*pieces, Text(text[done:])) if piece.text]


def _fold(text: str) -> str:
    return "".join(text.split()).casefold()
