"""One thread at a time in a rotary module that rewrites its frequencies in every forward."""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""A table of cos and sin takes milliseconds: who is inside for longer will not come out any more."""


def guard_rotary(model: Any) -> None:
    """Have threads pass through the model's rotary modules one by one; idempotent.

    Where frequencies depend on the length (longrope), such a module writes those of the present prompt
    into its buffer and then reads the buffer. A second thread in between turns the first one's keys by
    the frequencies of another prompt. What it returns is the caller's own, so nothing else has to wait:
    requests, background encoding and the user's own ``generate`` run side by side as on other models.

    The hooks stay, as those for narrowing do: removing them would change the model under other threads.
    """
    for module in model.modules():
        frequencies = any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
        if frequencies and not _guarded(module):
            turn = _Turn()
            # In this order: nobody who enters finds no way out.
            module.register_forward_hook(turn.leave, always_call=True)
            module.register_forward_pre_hook(turn.enter)


def _guarded(module: torch.nn.Module) -> bool:
    hooks = list(module._forward_pre_hooks.values())
    return any(isinstance(getattr(hook, "__self__", None), _Turn) for hook in hooks)


class _Turn:
    """A lock that is taken in one hook and given back in another.

    An interrupt (Ctrl-C) between the two, or a fork, leaves it taken by nobody: it is taken over then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: int | None = None

    def enter(self, *_: Any) -> None:
        me = threading.get_ident()
        # Mine already: an interrupt kept me from giving it back.
        if self._inside != me and not self._lock.acquire(timeout=PATIENCE_SECONDS):
            log.warning("a forward was interrupted inside a rotary module; going on without it")
        self._inside = me

    def leave(self, *_: Any) -> None:
        if self._inside == threading.get_ident():
            self._inside = None
            self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Turn, ()  # a copied or saved model gets a lock of its own
