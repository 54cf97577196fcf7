"""What the LangChain and LlamaIndex models share; for these integrations, no public interface."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

DEFAULT_MAX_TOKENS = 256

SETTINGS = ("namespace", "policy", "max_tokens", "temperature", "top_p", "top_k", "stop")
"""A model's settings that :func:`generation_options` takes."""


def check_engine(owner: str, engine: object) -> None:
    """ValueError if ``engine`` is no :class:`ragcachekit.RagCache`, nor something like one."""
    if not all(callable(getattr(engine, name, None)) for name in ("submit", "count_tokens")):
        raise ValueError(f"{owner} needs cache=RagCache(...), got {engine!r}")


def check_arguments(arguments: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Arguments of a model, as :func:`with_max_tokens`; ValueError for unknown ones."""
    unknown = sorted(arguments.keys() - set(known) - {"max_new_tokens"})
    if unknown:
        raise ValueError(
            f"unknown arguments {', '.join(unknown)}; options of transformers' generate go into "
            "generate_kwargs={...}"
        )
    return with_max_tokens(arguments)


def with_max_tokens(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with ``max_new_tokens`` as ``max_tokens``; ValueError for both."""
    given = dict(arguments)
    if "max_new_tokens" in given:
        if given.get("max_tokens") is not None:
            raise ValueError("give max_tokens or max_new_tokens, not both")
        given["max_tokens"] = given.pop("max_new_tokens")
    return given


def generation_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``RagCache.submit`` for a model's :data:`SETTINGS`; other settings are passed on.

    A temperature of None or 0 is greedy; ``top_p`` and ``top_k`` count only when sampling.
    """
    options = dict(settings)
    temperature, sampling = options.pop("temperature"), {}
    for name in ("top_p", "top_k"):
        if (value := options.pop(name)) is not None:
            sampling[name] = value
    options |= {"max_new_tokens": options.pop("max_tokens"), "do_sample": bool(temperature)}
    return options | {"temperature": temperature, **sampling} if temperature else options


def model_name(engine: Any) -> str:
    """Name or path of the engine's model; its class where it has none."""
    config = getattr(engine.model, "config", None)
    return str(getattr(config, "_name_or_path", "") or type(engine.model).__name__)
