"""Exceptions of the library.

Bad arguments raise :class:`ValueError` or :class:`TypeError`; a bad state raises a subclass of
:class:`RagCacheError`. :class:`Cancelled` is no error.
"""

from __future__ import annotations


def missing_extra(name: str, packages: str) -> str:
    """End of a message about missing packages: the command for pip that installs them, and their extra."""
    return f"pip install {packages} (the extra {name!r})"


class RagCacheError(Exception):
    """Base of all errors of this library about state."""


class ModelNotSupported(RagCacheError):
    """The model cannot be linked exactly; the message names the layer and the size of the difference."""


class ModelChanged(RagCacheError):
    """The model's weights, adapter or configuration changed after its fingerprint was taken."""


class Closed(RagCacheError):
    """A RagCache was used after its close, or one that was opened before a fork was used in the child."""


class PromptTooLong(RagCacheError):
    """The prompt (and the tokens asked for) exceeds the model's context length."""


class UnknownChunk(RagCacheError):
    """A chunk id in a prompt names no text that is known in its namespace: encode the text again."""


class LinkedPromptUsed(RagCacheError):
    """A linked prompt was used a second time; its cache already holds generated tokens."""


class GenerationNotSupported(RagCacheError):
    """The generation option asked for would be silently wrong with a linked cache."""


class QueueFull(RagCacheError):
    """Too many requests wait already: try again later, or give ``wait=``."""


class DeadlineExceeded(RagCacheError):
    """A queued request was not answered within its ``deadline``."""


class EngineError(RagCacheError):
    """The step of a batch, or the engine's thread, failed; its cause is attached."""


class StoreError(RagCacheError):
    """A KV store cannot be opened or written (permissions, ownership, no space)."""


class CorpusError(RagCacheError):
    """A corpus folder is missing, empty or unreadable."""


class RetrievalError(RagCacheError):
    """A query embedding or a vector index cannot be used (NaN, wrong width, empty index)."""


class Cancelled(BaseException):
    """The model work of a :class:`~ragcachekit.CancelScope` was cancelled.

    Not an :class:`Exception`, like :class:`asyncio.CancelledError`: nothing may go on with the request.
    """
