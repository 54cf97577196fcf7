"""Text to token ids: whole prompts as the user's own code tokenises them, and chunks by themselves."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ragcachekit.types import Ids

Span = tuple[int, int]

_FOLLOWED_BY = ("A", "1", "(")
"""What chunks begin with: a letter, a digit, a sign. Tokens before them that depend on it are not stable."""

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
        longest_first = sorted(filter(None, self.special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

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

    def chunk(self, text: str) -> Ids:
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
        """Ids of the blank line between two paragraphs."""
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


def _meets(span: Span, others: Sequence[Span]) -> bool:
    return any(span[0] < end and start < span[1] for start, end in others)


def without_lone_surrogates(text: str) -> str:
    """Text with U+FFFD for lone surrogates, which make tokenizers raise."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
