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
    """A tokenised prompt.

    ``offsets`` are the characters ``(start, end)`` of each token, None where a slow tokenizer gives none.
    ``plain`` counts special-token strings of documents that are read as plain text.
    """

    ids: Ids
    offsets: list[Span] | None
    plain: int = 0


class PromptTokenizer:
    """Tokenises prompts and chunks with private copies of the user's tokenizer.

    Copies, because a fast tokenizer's special-token setting is its state. Special tokens in chunks are plain
    text. Chunks get no leading space from tokenizers that mark word starts (Llama 2, T5): they are encoded
    after a newline that is cut off.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._texts = copy.deepcopy(tokenizer)
        self._chunks = copy.deepcopy(tokenizer)
        self._locks = {id(self._texts): threading.Lock(), id(self._chunks): threading.Lock()}
        self._gives_offsets = bool(getattr(tokenizer, "is_fast", False))
        newline, a = self._raw(self._texts, "\n"), self._raw(self._texts, "a")
        spaced = self._raw(self._texts, "\na") != newline + a
        # The letter is for text that begins with a newline: there may be a token for two of them.
        self._after = (("\n", newline), ("a", a)) if spaced else ()
        self.bos: int | None = tokenizer.bos_token_id
        whole, bare = list(self._texts("a").input_ids), list(a)
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        self.leading = tuple(whole[:at])
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
        return self._raw(self._texts, text) if first else self._continued(self._texts, text)

    def plain(self, text: str) -> Ids:
        """Ids of text in which special-token strings are plain text."""
        ids = self._continued(self._chunks, text, split_special_tokens=True)
        if self._special_ids.isdisjoint(ids) or not self._special.search(text):
            return ids
        # Some slow tokenizers keep such a string whole even so: not if it comes in two pieces.
        cuts = [0, *(match.start() + 1 for match in self._special.finditer(text)), len(text)]
        pieces = [text[start:stop] for start, stop in pairwise(cuts)]
        return tuple(i for piece in pieces for i in self._continued(self._chunks, piece))

    def chunk(self, text: str) -> Ids:
        """Ids of a chunk in a prompt, without last tokens that would run into a blank line after it."""
        alone = self.plain(text)
        stable = common_prefix(alone, self.plain(text + "\n\nA"))
        return stable if 2 * len(stable) >= len(alone) else alone

    def before_chunk(self, text: str, *, special: bool) -> Ids:
        """Ids of the text before a prompt's first chunk that are the same whatever the chunk begins with.

        ``special``: with what the tokenizer puts in front of plain text (BOS).
        """
        text = without_lone_surrogates(text)
        if not text:
            return self.leading if special else ()
        with self._locks[id(self._texts)]:
            followed = [
                self._texts(text + end, add_special_tokens=special, verbose=False).input_ids
                for end in _FOLLOWED_BY
            ]
        return common_prefix(*followed)

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
        with self._locks[id(self._texts)]:
            found = self._texts(
                text,
                add_special_tokens=special,
                return_offsets_mapping=self._gives_offsets,
                verbose=False,
            )
        ids = Ids(found.input_ids)
        if not self._gives_offsets:
            return None if self._has_special(text, apart) else PromptTokens(ids, None)
        offsets = [(int(start), int(end)) for start, end in found.offset_mapping]
        if not self._has_special(text, apart):
            return PromptTokens(ids, offsets)
        return self._with_plain(text, ids, offsets, apart)

    def _has_special(self, text: str, apart: Sequence[Span]) -> bool:
        """Whether a special-token string stands in, or reaches into, one of the texts apart."""
        spans = (match.span() for match in self._special.finditer(text)) if apart else ()
        return any(_meets(span, apart) for span in spans)

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
            plain = self._continued_with_offsets(text[start:stop], first=start == 0)
            out += [*ids[done : low + 1], *plain.ids]
            places += [*offsets[done : low + 1], *((a + start, b + start) for a, b in plain.offsets or ())]
            done = high
        return PromptTokens((*out, *ids[done:]), [*places, *offsets[done:]], len(documents))

    def _continued_with_offsets(self, text: str, first: bool) -> PromptTokens:
        """Plain text and its offsets, as at the start of a prompt or after other text."""
        for mark, after in (*(() if first else self._after), ("", Ids())):
            with self._locks[id(self._chunks)]:
                found = self._chunks(
                    mark + text,
                    add_special_tokens=False,
                    split_special_tokens=True,
                    return_offsets_mapping=True,
                    verbose=False,
                )
            if Ids(found.input_ids[: len(after)]) == after:
                break
        offsets = [(start - len(mark), end - len(mark)) for start, end in found.offset_mapping[len(after) :]]
        return PromptTokens(Ids(found.input_ids[len(after) :]), offsets)

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
        """Whether the chat template shows the tools that it is given, found out by rendering one."""
        try:
            text = self.render([{"role": "user", "content": "a"}], [{"type": "function", "function": _PROBE}])
        except Exception:  # no template, or one that fails on tools
            return False
        return str(_PROBE["name"]) in text

    def _continued(self, tokenizer: Any, text: str, **options: Any) -> Ids:
        for mark, after in self._after if text else ():
            ids = self._raw(tokenizer, mark + text, **options)
            if ids[: len(after)] == after:
                return ids[len(after) :]
        return self._raw(tokenizer, text, **options)

    def _raw(self, tokenizer: Any, text: str, **options: Any) -> tuple[int, ...]:
        if not text:
            return ()
        text = without_lone_surrogates(text)
        with self._locks[id(tokenizer)]:
            # verbose=False: no warning for a document longer than the context.
            return tuple(tokenizer(text, add_special_tokens=False, verbose=False, **options).input_ids)


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
