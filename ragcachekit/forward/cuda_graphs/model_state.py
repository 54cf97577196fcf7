"""Whether a model is still as it was when its forward was captured, and whether it can be captured."""

from __future__ import annotations

from typing import Any

from ragcachekit.model.identity.watch import ModelWatch

_INERT = ("ragcachekit.forward.narrowing", "transformers.utils.output_capturing")
"""Whose hooks on layers do nothing in the forwards that are captured."""


class ModelState:
    """Everything about a model that a captured forward has built in: tensors, adapters, hooks.

    Parameters
    ----------
    model : torch.nn.Module

    Attributes
    ----------
    obstacle : str or None
        What about the model speaks against capturing it.
    """

    def __init__(self, model: Any) -> None:
        self._watch = ModelWatch(model)
        # The model's own hooks run around its forward, captured or not.
        inside = [module for module in model.modules() if module is not model]
        self._hooks = [
            hooks for module in inside for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._seen = self._now()
        foreign = [hook for hooks in self._hooks for hook in hooks.values() if _module_of(hook) not in _INERT]
        self.obstacle = "a layer has forward hooks, which a graph would not run" if foreign else None

    def changed(self) -> bool:
        """Whether captured forwards may compute something else than the model does now."""
        return self._now() != self._seen

    def _now(self) -> tuple[str, tuple[int, ...]]:
        return self._watch.state(), tuple(map(len, self._hooks))


def _module_of(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))
