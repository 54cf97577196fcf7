"""Answers that are JSON of a schema: nothing else can be chosen. Needs the extra ``structured``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from ragcachekit.errors import missing_extra
from ragcachekit.types import check_type

_COMPILER: Any = {"coerce_one_of": True, "whitespace_pattern": r" |\n[ \t]{0,16}"}
"""For llguidance: ``oneOf`` as ``anyOf``, and no white space without end, which small models like."""


def token_bytes(tokenizer: Any) -> Any:
    """llguidance's tokenizer, which takes a second to make; ImportError without llguidance.

    ValueError for a tokenizer that is not a fast one, or whose tokens have no bytes (WordPiece).
    """
    try:
        import llguidance.hf
    except ModuleNotFoundError as error:
        needed = missing_extra("structured", "llguidance")
        raise ImportError(f"json_schema= needs llguidance: {needed}") from error
    try:
        return llguidance.hf.from_tokenizer(tokenizer)
    except ValueError as error:
        raise ValueError(f"json_schema= needs another tokenizer: {error}") from error


class JsonProcessor(LogitsProcessor):  # type: ignore[misc]
    """Leaves the scores ``[1, vocab]`` of tokens that continue JSON of a schema; for one answer.

    ``ends`` are the tokens that can end it. If other processors left none of these tokens, all are equal.
    ValueError for a schema that is wrong, or has keywords that cannot be followed (``not``, ``if``).
    """

    def __init__(self, tokenizer: Any, schema: Mapping[str, Any], ends: frozenset[int]) -> None:
        from llguidance import LLMatcher

        check_type("json_schema", schema, Mapping, "a JSON schema as a dict")
        if not ends:
            raise ValueError("json_schema= needs an end token; the model's generation config has none")
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_COMPILER)
        except (TypeError, RecursionError) as error:  # what is in it is not JSON
            raise ValueError(f"json_schema is not a JSON schema: {error}") from error
        self._matcher, self._ends = LLMatcher(tokenizer, grammar, log_level=0), list(ends)
        self._read = 0  # tokens
        self._check()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not 0 < self._read < input_ids.shape[1]:  # the answer begins, perhaps again
            self._matcher.reset()
            self._read = input_ids.shape[1]
        self._matcher.consume_tokens(input_ids[0, self._read :].tolist())
        self._read = input_ids.shape[1]
        self._check()
        allowed = torch.zeros(scores.shape[1], dtype=torch.bool)
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            known = torch.from_numpy(np.unpackbits(bits, bitorder="little"))[: len(allowed)]
            allowed[: len(known)] = known.bool()
        if self._matcher.is_accepting():
            allowed[self._ends] = True
        banned = ~allowed.to(scores.device)
        left = scores.masked_fill(banned, -inf)
        return torch.where(left.isneginf().all(), torch.zeros_like(left).masked_fill(banned, -inf), left)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"json_schema cannot be followed: {self._matcher.get_error()}")
