"""What the LangChain and LlamaIndex models share; for these integrations, no public interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Self

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from ragcachekit.observers import model_name as model_name

SETTINGS = ("namespace", "policy", "max_tokens", "temperature", "top_p", "top_k", "stop")


class GenerationSettings(BaseModel):
    """How every call generates, unless it says otherwise.

    ``namespace`` and ``policy`` are the engine's own if None. A ``temperature`` of None or 0 is greedy;
    ``top_p`` and ``top_k`` count only when sampling. Answers end before the texts in ``stop``.
    ``generate_kwargs`` is anything else for transformers' ``generate``.
    """

    namespace: str | None = None
    policy: str | None = None
    max_tokens: int = Field(default=256, gt=0)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, gt=0)
    stop: list[str] | None = None
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)

    _speculation: Any = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: dict[str, Any]) -> dict[str, Any]:
        refuse_cache(values)
        # "class_name" is what LlamaIndex writes beside the fields when it serialises a component.
        if unknown := sorted(values.keys() - cls.model_fields.keys() - {"class_name"}):
            raise ValueError(
                f"unknown arguments {', '.join(unknown)}; options of transformers' generate go into "
                "generate_kwargs={...}, the number of tokens is max_tokens"
            )
        return values

    def speculating(self, speculation: Any) -> Self:
        """A copy whose prompts go to a :class:`~ragcachekit.engine.speculation.Speculation`."""
        model = self.model_copy()
        model._speculation = speculation
        return model

    @property
    def _engine(self) -> Any:
        model: Any = self
        return self._speculation or model.rag

    def _report(self, answer: Any) -> dict[str, Any]:
        report: dict[str, Any] = answer.report.to_dict()
        return report | ({"speculation": self._speculation.report()} if self._speculation else {})

    def call_options(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of ``RagCache.submit``: these settings, overridden for one call."""
        given = {name: overrides[name] for name in SETTINGS if name in overrides}
        chosen = GenerationSettings.model_validate({name: getattr(self, name) for name in SETTINGS} | given)
        options: dict[str, Any] = {
            name: getattr(chosen, name) or None for name in ("namespace", "policy", "stop")
        }
        options |= {"max_new_tokens": chosen.max_tokens, "do_sample": bool(chosen.temperature)}
        if chosen.temperature:
            sampling = {name: getattr(chosen, name) for name in ("temperature", "top_p", "top_k")}
            options |= {name: value for name, value in sampling.items() if value is not None}
        others = {name: value for name, value in overrides.items() if name not in SETTINGS}
        return options | self.generate_kwargs | others


class NotPickled:
    """Base of components that hold an engine or an index: pickling raises TypeError.

    LlamaIndex's own components drop what cannot be pickled with a warning, and would fail later.
    """

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} holds an engine or open files, and cannot be pickled: make one in each "
            "process"
        )


def refuse_cache(values: Mapping[str, Any]) -> None:
    """ValueError for an engine that is given as ``cache``, which in LangChain is its cache of answers."""
    if callable(getattr(values.get("cache"), "register", None)):
        raise ValueError("give the engine as rag=..., not as cache=...")


def check_engine(owner: str, engine: object) -> None:
    """ValueError if ``engine`` is no :class:`ragcachekit.RagCache`, nor something like one."""
    if not all(callable(getattr(engine, name, None)) for name in ("submit", "register", "count_tokens")):
        raise ValueError(f"{owner} needs rag=RagCache(...), got {engine!r}")


def check_pair(owner: str, retriever: tuple[Any, type], llm: tuple[Any, type]) -> None:
    """Error unless retriever and model are of these classes and on one engine."""
    for name, (given, kind) in (("retriever", retriever), ("llm", llm)):
        if not isinstance(given, kind):
            raise TypeError(
                f"{owner} needs a {kind.__name__} as its {name}, got {type(given).__name__}: wrap your own "
                "retriever; bind arguments, and put parsers and fallbacks, after it"
            )
    if retriever[0].query_cache.rag is not llm[0].rag:
        raise ValueError(f"{owner} needs one engine: give the same rag= to the retriever and the llm")
