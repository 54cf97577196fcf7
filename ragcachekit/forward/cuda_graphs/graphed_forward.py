"""A model's forward that runs linked prompts as CUDA graphs where possible, and reports why where not."""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.config import GraphConfig
from ragcachekit.forward.attention import is_installed
from ragcachekit.forward.cache import LinkedCache, LinkRows
from ragcachekit.forward.cuda_graphs.capture import Capture, capture_for, has_graphs
from ragcachekit.forward.cuda_graphs.captured_cache import NotCapturable
from ragcachekit.forward.cuda_graphs.runner import CaptureFailed, GraphRunner
from ragcachekit.model.identity.watch import ModelWatch

log = logging.getLogger(__name__)

_INERT = ("ragcachekit.forward.narrowing", "transformers.utils.output_capturing")
"""Modules whose hooks on layers do nothing in captured forwards."""

_ARGUMENTS = {
    "input_ids",
    "position_ids",
    "past_key_values",
    "attention_mask",
    "logits_to_keep",
    "use_cache",
    "return_dict",
}
"""Arguments of the forward that a captured one can take."""


class GraphedForward:
    """Replaces a model's ``forward``; acts for linked prefills of one prompt only.

    An eager forward of 32 layers keeps the host busy for 15 to 25 ms, several times what a GPU needs for the
    few rows of a linked prompt. Transformers documents replacing an instance's ``forward``
    (``model.forward = torch.compile(model.forward)``). The model is not kept alive; a deep or pickled copy
    has its own forward and not this one.
    """

    def __init__(self, model: Any, config: GraphConfig) -> None:
        self.config = config
        self._model: weakref.ref[Any] = weakref.ref(model)
        self._before = vars(model).get("forward")
        self._own = _own_forward(self._model, self._before)
        self._choosing = threading.Lock()
        self._runner: GraphRunner | None = None
        self._state: ModelState | None = None
        self._refused: str | None = None
        # transformers reads the signature. Not functools.wraps: it would keep the model alive.
        self.__signature__ = inspect.signature(model.forward)
        self.__name__, self.__doc__ = "forward", model.forward.__doc__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model(), "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, captured or its own."""
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, LinkedCache) or torch.compiler.is_compiling() or cache.pending is None:
            return self._own(*args, **kwargs)
        why = self._unfit(cache.pending, cache, args, kwargs)
        if why is None:
            try:
                return self._graphed(cache, kwargs)
            except NotCapturable as reason:
                why = str(reason)
        cache.forward = f"eager: {why}"
        return self._own(*args, **kwargs)

    def remove(self) -> None:
        """Restore the model's own forward, unless another one has replaced this one."""
        own = vars(self._model())
        if own.get("forward") is self:
            del own["forward"]
            if self._before is not None:
                own["forward"] = self._before

    def _unfit(
        self, rows: LinkRows, cache: LinkedCache, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """The reason why this call cannot be captured, or None."""
        other = [n for n, v in kwargs.items() if n not in _ARGUMENTS and v is not None and v is not False]
        ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
        if args or other:
            return f"the forward is given {', '.join(other) or 'positional arguments'}"
        if ids is None or positions is None or ids.shape[0] != 1:
            return "it is not one prompt's ids and positions"
        if ids.shape != positions.shape or ids.shape[1] != len(rows.positions):
            return "ids or positions are not those of the rows"
        if rows.observer is not None or cache.before_layer is not None:
            return "the policy watches the forward or narrows its rows"
        keep, fields = kwargs.get("logits_to_keep"), kwargs.get("return_dict")
        if not isinstance(keep, int) or keep != 1 or not kwargs.get("use_cache") or fields is False:
            return "more than the last row's logits is asked for"
        if len(rows.positions) > self.config.max_rows:
            return f"more than {self.config.max_rows} rows"
        if cache.coming > self.config.max_coming:
            return "its KV is still on its way to the device"
        if torch.is_grad_enabled() or torch.is_autocast_enabled(ids.device.type):
            return "gradients or autocast are on"
        return None

    def _graphed(self, cache: LinkedCache, kwargs: dict[str, Any]) -> Any:
        runner = self._current()
        cache.settle()  # before the capture: LoadFailed is not a reason to refuse the model
        raise_if_cancelled()
        try:
            out = runner.run(cache, kwargs["input_ids"], kwargs["position_ids"])
        except CaptureFailed as error:
            self._refused = str(error)
            log.warning("linked forwards of %s run without graphs: %s", type(self._model()).__name__, error)
            raise
        cache.forward = "graph"
        return out

    def _current(self) -> GraphRunner:
        """The runner of the model as it is now; ``NotCapturable`` if it cannot be captured."""
        with self._choosing:
            if self._state is None or self._state.changed():
                self._renew(self._model())
            if self._refused is not None or self._runner is None:
                raise NotCapturable(self._refused or "the model's device has no graphs")
            return self._runner

    def _renew(self, model: Any) -> None:
        """Drop the graphs; the model may be on another device now."""
        self._state = ModelState(model)
        self._refused = self._state.obstacle
        if "logits_to_keep" not in self.__signature__.parameters:
            self._refused = "the model's forward has no logits_to_keep"
        capture = cast("Capture | None", self.config.capture or capture_for(model.device))
        vocab = model.config.get_text_config().vocab_size
        self._runner = None if capture is None else GraphRunner(self._own, capture, model.device, vocab)


def use_graphs(model: Any, graphs: str | GraphConfig = "auto") -> None:
    """Turn captured linked forwards of an admitted model on or off; the last call counts.

    ``auto`` means the defaults, on devices that have graphs. ValueError for anything but ``auto``, ``off``
    and a configuration.
    """
    if not isinstance(graphs, GraphConfig) and graphs not in ("auto", "off"):
        raise ValueError(f"graphs must be 'auto', 'off' or a GraphConfig, got {graphs!r}")
    config = {"auto": GraphConfig(), "off": None}[graphs] if isinstance(graphs, str) else graphs
    present = vars(model).get("forward")
    if isinstance(present, GraphedForward):
        if present.config == config:
            return
        present.remove()
    if config is None or not is_installed(model):
        return
    if config.capture is not None or has_graphs(model.device):
        model.forward = GraphedForward(model, config)


def _own_forward(model: weakref.ref[Any], before: Callable[..., Any] | None) -> Callable[..., Any]:
    """The model's earlier forward, without keeping the model alive."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        own: Any = model()
        return type(own).forward(own, *args, **kwargs)

    return before or forward


class ModelState:
    """The tensors, adapters and hooks that a captured forward depends on.

    ``obstacle`` is the reason why the model cannot be captured, or None.
    """

    def __init__(self, model: Any) -> None:
        self._watch = ModelWatch(model)
        # The model's own hooks run around its forward, captured or not.
        inside = [module for module in model.modules() if module is not model]
        self._hooks = [
            hooks for module in inside for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._captured = self._now()
        foreign = [hook for hooks in self._hooks for hook in hooks.values() if _module_of(hook) not in _INERT]
        self.obstacle = "a layer has forward hooks, which a graph would not run" if foreign else None

    def changed(self) -> bool:
        """Whether captured forwards may differ from the model's present one."""
        return self._now() != self._captured

    def _now(self) -> tuple[str, tuple[int, ...]]:
        return self._watch.state(), tuple(map(len, self._hooks))


def _module_of(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))
