"""Locks around rotary modules that rewrite their frequencies in every forward."""

from __future__ import annotations

import logging
import threading
from typing import Any

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0  # longest wait for the lock; computing cos and sin takes milliseconds


def guard_rotary(model: Any) -> None:
    """Let one thread at a time run each rotary module of the model; idempotent.

    Length-dependent modules (longrope) write the prompt's frequencies into a buffer and then read it. The
    hooks stay: removing them would change the model under other threads.
    """
    for module in model.modules():
        frequencies = any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
        hooks = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
        if frequencies and not any(isinstance(owner, _Turn) for owner in hooks):
            turn = _Turn()
            # In this order: every thread that acquires the lock also releases it.
            module.register_forward_hook(turn.release, always_call=True)
            module.register_forward_pre_hook(turn.acquire)


class _Turn:
    """A lock that one hook acquires and another releases; taken over after an interrupt in between."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: int | None = None

    def acquire(self, *_: Any) -> None:
        me = threading.get_ident()
        # This thread may hold it already, where an interrupt prevented the release.
        if self._inside != me and not self._lock.acquire(timeout=PATIENCE_SECONDS):
            log.warning("a forward was interrupted inside a rotary module; going on without it")
        self._inside = me

    def release(self, *_: Any) -> None:
        if self._inside == threading.get_ident():
            self._inside = None
            self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Turn, ()  # a copied or saved model gets a lock of its own
