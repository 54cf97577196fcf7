"""Answers that are JSON of a schema: what does not fit cannot be chosen. Needs the extra ``structured``."""

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

_COMPILER = {"coerce_one_of": True, "whitespace_pattern": r" |\n[ \t]{0,16}"}
"""For llguidance: ``oneOf`` as ``anyOf``, and no white space without end, which small models like."""


class JsonGrammars:
    """Makes logits processors of JSON schemas, for one tokenizer.

    Raises
    ------
    ImportError
        Without llguidance; names the extra.
    ValueError
        For a tokenizer that is not a fast one, or whose tokens have no bytes.
    """

    def __init__(self, tokenizer: Any) -> None:
        try:
            import llguidance.hf
        except ModuleNotFoundError as error:
            if error.name != "llguidance":
                raise
            needed = missing_extra("structured", "llguidance")
            raise ImportError(f"json_schema= needs llguidance: {needed}") from error
        self._matcher = llguidance.LLMatcher
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer)
        except ValueError as error:
            raise ValueError(f"json_schema= needs another tokenizer: {error}") from error

    def processor(self, schema: Mapping[str, Any], ends: frozenset[int]) -> JsonProcessor:
        """A processor for one answer, which the tokens ``ends`` can end; ValueError for a bad schema.

        Keywords of JSON Schema that cannot be followed (``not``, ``if``) are errors, too.
        """
        check_type("json_schema", schema, Mapping, "a JSON schema as a dict")
        if not ends:
            raise ValueError("json_schema= needs an end token; the model's generation config has none")
        try:
            grammar = self._matcher.grammar_from_json_schema(json.dumps(schema), overrides=_COMPILER)
        except (TypeError, RecursionError) as error:  # what is in it is not JSON
            raise ValueError(f"json_schema is not a JSON schema: {error}") from error
        matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"json_schema cannot be followed: {matcher.get_error()}")
        return JsonProcessor(matcher, sorted(ends))


class JsonProcessor(LogitsProcessor):  # type: ignore[misc]
    """Leaves the scores ``[1, vocab]`` of tokens that continue JSON of the schema; for one answer.

    Other processors have no say against it: if they left none of these tokens, all of them are equal.
    """

    def __init__(self, matcher: Any, ends: list[int]) -> None:
        self._matcher, self._ends = matcher, ends
        self._read = 0  # tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not 0 < self._read < input_ids.shape[1]:  # the answer begins, perhaps again
            self._matcher.reset()
            self._read = input_ids.shape[1]
        for token in input_ids[0, self._read :].tolist():
            self._matcher.consume_token(token)
        self._read = input_ids.shape[1]
        if self._matcher.is_error():
            raise ValueError(f"json_schema cannot be followed: {self._matcher.get_error()}")
        allowed = torch.zeros(scores.shape[1], dtype=torch.bool)
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            known = torch.from_numpy(np.unpackbits(bits, bitorder="little"))[: len(allowed)]
            allowed[: len(known)] = known.bool()
        if self._matcher.is_accepting():
            allowed[self._ends] = True
        allowed = allowed.to(scores.device)
        left = scores.masked_fill(~allowed, -inf)
        return torch.where(left.isneginf().all(), torch.zeros_like(left).masked_fill(~allowed, -inf), left)
