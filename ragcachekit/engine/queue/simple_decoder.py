"""Until the batch decoder is here: every request is answered whole when it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragcachekit.generate.run import Generated
from ragcachekit.plan.link_plan import LinkPlan


class Decoding:
    """A request that has ended."""

    finished = True

    def __init__(self, whole: Generated) -> None:
        self._whole = whole

    def generated(self, cancelled: bool = False) -> Generated:
        return self._whole


class BatchDecoder:
    """Answers requests one at a time."""

    def __init__(self, run: Callable[..., Generated]) -> None:
        self._run = run
        self.active: Sequence[Decoding] = ()

    def unsupported(self, options: Mapping[str, Any]) -> str | None:
        return None

    def has_room(self, tokens: int) -> bool:
        return True

    def begin(self, plan: LinkPlan, options: Mapping[str, Any], **asked: Any) -> Decoding:
        return Decoding(self.run(plan, options, **asked))

    def run(self, plan: LinkPlan, options: Mapping[str, Any], **asked: Any) -> Generated:
        return self._run([plan], options, **asked)

    def step(self) -> list[Decoding]:
        return []

    def drop(self, decoding: Decoding) -> None:
        return

    def clear(self) -> None:
        return
