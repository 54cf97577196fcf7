"""Text to token ids, segment by segment, without decoding and encoding again."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

_PROBE = {"name": "zq7xprobe", "description": "", "parameters": {"type": "object", "properties": {}}}


class SegmentTokenizer:
    """Tokenises the segments of a prompt with private copies of the user's tokenizer.

    Copies, because a fast tokenizer's special-token setting is its state. Special tokens in chunks are plain
    text. Later segments get no leading space from tokenizers that mark word starts (Llama 2, T5): they are
    encoded behind a newline that is cut off.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._texts = copy.deepcopy(tokenizer)
        self._chunks = copy.deepcopy(tokenizer)
        self._locks = {id(self._texts): threading.Lock(), id(self._chunks): threading.Lock()}
        newline, a = self._raw(self._texts, "\n"), self._raw(self._texts, "a")
        spaced = self._raw(self._texts, "\na") != newline + a
        # The letter is for text that begins with a newline: there may be a token for two of them.
        self._behind = (("\n", newline), ("a", a)) if spaced else ()
        self.bos: int | None = tokenizer.bos_token_id
        whole, bare = list(self._texts("a").input_ids), list(a)
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        self.leading = tuple(whole[:at])
        added = tokenizer.added_tokens_decoder.values()
        self.special_tokens = frozenset(
            [*tokenizer.all_special_tokens, *(token.content for token in added if token.special)]
        )

    @property
    def pad(self) -> int:
        """Id for padding; the model never reads it."""
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(int(token) for token in ids if token is not None)

    def text(self, text: str, *, first: bool = False) -> tuple[int, ...]:
        """Ids of fixed text; ``first`` for the start of a prompt. No BOS is added."""
        return self._raw(self._texts, text) if first else self._continued(self._texts, text)

    def chunk(self, text: str) -> tuple[int, ...]:
        """Ids of a chunk: special-token text in it is plain text."""
        return self._continued(self._chunks, text, split_special_tokens=True)

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

    def _continued(self, tokenizer: Any, text: str, **options: Any) -> tuple[int, ...]:
        for mark, behind in self._behind if text else ():
            ids = self._raw(tokenizer, mark + text, **options)
            if ids[: len(behind)] == behind:
                return ids[len(behind) :]
        return self._raw(tokenizer, text, **options)

    def _raw(self, tokenizer: Any, text: str, **options: Any) -> tuple[int, ...]:
        if not text:
            return ()
        text = without_lone_surrogates(text)
        with self._locks[id(tokenizer)]:
            # verbose=False: no warning for a document longer than the context.
            return tuple(tokenizer(text, add_special_tokens=False, verbose=False, **options).input_ids)


def without_lone_surrogates(text: str) -> str:
    """Text with U+FFFD for lone surrogates, which make tokenizers raise."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
