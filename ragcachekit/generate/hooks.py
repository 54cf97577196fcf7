"""What listens to one call of generate: when its prefill begins and ends, when to stop, what is streamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragcachekit.generate.first import FirstLogits, FirstScores
from ragcachekit.generate.stopping import Watch
from ragcachekit.generate.streaming import OrderedPrompt
from ragcachekit.model.cancellation import CancelScope


class Hooks:
    """Our stopping criterion, logits processors and streamer, beside the user's.

    Parameters
    ----------
    options : mapping
        Arguments of generate; those with the hooks among them are :attr:`options`.
    prompt : sequence of int
        What the user's streamer is told first.
    scope : CancelScope
    first : FirstScores, optional

    Attributes
    ----------
    watch : Watch
    streamer : OrderedPrompt or None
        None where the user gave none.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        prompt: Sequence[int],
        scope: CancelScope,
        first: FirstScores | None,
    ) -> None:
        self.watch = Watch(scope)
        self._logits = FirstLogits()
        given = options.get("streamer")
        self.streamer = OrderedPrompt(given, prompt) if given else None
        ours = [self._logits] if first is None else [self._logits, first]
        self.options = {
            **options,
            "stopping_criteria": [*options.get("stopping_criteria", ()), self.watch],
            "logits_processor": [*(options.get("logits_processor") or ()), *ours],
            "streamer": self.streamer,
        }

    def prefill(self, begun: float) -> float | None:
        """Seconds from ``begun``, when generate was called, to the first logits; None if there were none.

        What the user's streamer did with the prompt is not counted: generate hands it over before the
        forward. It gets tokens after the logits, and other code of the user's never runs in a prefill
        that is measured (it is linked ahead).
        """
        if self._logits.at is None:
            return None
        given = self.streamer.given if self.streamer is not None else 0.0
        return self._logits.at - max(begun, given)
