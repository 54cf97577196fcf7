"""The method of RagCache that measures what ``policy="auto"`` stands for."""

from __future__ import annotations

from collections.abc import Iterable

from ragcachekit.engine.chunk_methods import ChunkMethods, strings
from ragcachekit.errors import ModelChanged
from ragcachekit.plan.planner import MODEL_CHANGED
from ragcachekit.policies.registry import open_policy
from ragcachekit.prompt.parser import PromptLike
from ragcachekit.quality.check import CheckPrompt
from ragcachekit.quality.records import TuneReport


class TuneMethods(ChunkMethods):
    """Adds :meth:`tune`; the base of :class:`ragcachekit.RagCache`."""

    def tune(
        self,
        texts: Iterable[str] | None = None,
        *,
        prompts: Iterable[PromptLike] | None = None,
        system: str | None = None,
        namespace: str | None = None,
        progress: bool = False,
    ) -> TuneReport:
        """Choose encoder and policy for ``policy="auto"`` now, by at most a minute of measuring.

        Prompts are continued by a full prefill and under every candidate. The one whose next tokens differ
        least is chosen and recorded in the cache folder, for this model and namespace. Give ``prompts`` that
        are like those to come, or call it after some were answered: what else it has to measure on are
        sentences of chunks that the model continues, which it may read in another way than questions.

        Parameters
        ----------
        texts : iterable of str, optional
            Chunk texts to make prompts of; default are the namespace's registered ones, where no prompt with
            two chunks or more was answered.
        prompts : iterable, optional
            Prompts as for :meth:`generate`, each with two chunks or more; default are the last 16 answered.
        system : str, optional
            Text before a prompt's first chunk, as the model sees it; default is the last one used in the
            namespace.
        progress : bool
            Show a progress bar over prompts.

        Returns
        -------
        TuneReport
            The choice, and KL and recomputed share of every candidate.

        Raises
        ------
        ValueError
            For fewer than two chunks, an unknown ``system``, or the encoder ``in-prompt``.
        PromptTooLong
        RagCacheError
            If not even one prompt could be measured in a minute.
        ModelChanged
            If the model changed since this object was made.
        Cancelled
            In a cancelled :class:`ragcachekit.CancelScope`.
        """
        namespace = self._checked(namespace)
        if not self._planner.unchanged():
            raise ModelChanged(MODEL_CHANGED)
        given = None if texts is None else strings(texts, "texts")
        behind = None if system is None else self._parser.system_ids(system)
        asked = None if prompts is None else [self._prompt(prompt, namespace) for prompt in prompts]
        return self._components.auto.tune(given, asked, behind, namespace, progress)

    def _prompt(self, prompt: PromptLike, namespace: str) -> CheckPrompt:
        parsed = self._parser.parse(prompt, namespace)
        self._planner.prepare(parsed, open_policy("full"))  # notes the prompt, and refuses one too long
        return CheckPrompt(parsed.segments, parsed.texts)
