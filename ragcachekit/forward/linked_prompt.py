"""A linked prompt in the user's hands."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from ragcachekit.errors import LinkedPromptUsed
from ragcachekit.reports import LinkReport


class LinkedPrompt:
    """What ``rag.link`` returns; goes into one call of ``model.generate`` or one loop of your own.

    The prompt is linked already, all but its last token, and the ids are in order: everything that
    generate offers for a pre-filled cache works (``rag.generate`` saves the extra pass over the
    weights by linking inside generate's own prefill).

    For several beams or sequences repeat the cache first, as for any pre-filled cache:
    ``inputs["past_key_values"].batch_repeat_interleave(n)``.

    Attributes
    ----------
    input_ids : torch.Tensor
        ``[1, tokens]``, the whole prompt.
    """

    def __init__(self, inputs: dict[str, Any], report: LinkReport) -> None:
        self._inputs: dict[str, Any] | None = inputs
        self.input_ids: torch.Tensor = inputs["input_ids"]
        self.report = report

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for ``model.generate``, once.

        Raises
        ------
        LinkedPromptUsed
            At the second use: the cache holds generated tokens by then.
        """
        if self._inputs is None:
            raise LinkedPromptUsed("this linked prompt was used already; call rag.link(prompt) again")
        inputs, self._inputs = self._inputs, None
        return inputs

    @property
    def cache(self) -> Cache | None:
        """The cache alone, for a loop of your own; None if nothing was reused. Counts as the one use."""
        return self.inputs.get("past_key_values")
