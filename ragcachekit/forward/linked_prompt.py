"""The result of ``rag.link``: a linked prompt for one call of generate."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from ragcachekit.errors import LinkedPromptUsed
from ragcachekit.reports import LinkReport


class LinkedPrompt:
    """A linked prompt for one call of ``model.generate`` or one loop of your own.

    All tokens but the last are in the cache, and the ids are in order: everything that generate offers for
    a pre-filled cache works. (``rag.generate`` links inside generate's own prefill and saves one pass over
    the weights.) For several beams or sequences repeat the cache first:
    ``inputs["past_key_values"].batch_repeat_interleave(n)``.

    Attributes
    ----------
    input_ids : torch.Tensor
        ``[1, tokens]``, the whole prompt.
    report : LinkReport
    """

    def __init__(self, inputs: dict[str, Any], report: LinkReport) -> None:
        self._inputs: dict[str, Any] | None = inputs
        self.input_ids: torch.Tensor = inputs["input_ids"]
        self.report = report

    def __repr__(self) -> str:
        return f"LinkedPrompt({self.report})"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for ``model.generate``.

        LinkedPromptUsed at the second use: the cache holds generated tokens by then.
        """
        if self._inputs is None:
            raise LinkedPromptUsed("this linked prompt was used already; call rag.link(prompt) again")
        inputs, self._inputs = self._inputs, None
        return inputs

    @property
    def cache(self) -> Cache | None:
        """The cache alone, for a loop of your own; None if nothing was reused. Counts as the one use."""
        return self.inputs.get("past_key_values")
