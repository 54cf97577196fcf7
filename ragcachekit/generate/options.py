"""What a call of generate is given: options (which never work, which need a link first) and streamers."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from numbers import Integral
from threading import Lock
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.streamers import BaseStreamer
from transformers.utils import TransformersKwargs

from ragcachekit.errors import GenerationNotSupported
from ragcachekit.types import WHOLE, check_number, check_type

DEFAULT_NEW_TOKENS = 256
_LIMITS = {"max_new_tokens", "max_length", "max_time", "generation_config"}

REFUSED = {
    **dict.fromkeys(
        ("assistant_model", "assistant_early_exit"),
        "assisted decoding rolls the cache back, which a linked cache cannot follow",
    ),
    "prompt_lookup_num_tokens": "prompt-lookup decoding reads the prompt's order and rolls the cache back",
    "guidance_scale": "classifier-free guidance runs the model on a second prompt without this cache",
    "cache_implementation": "the linked cache is the cache",
    "penalty_alpha": "contrastive search is not part of transformers' generate loop any more",
    "dola_layers": "DoLa is not part of transformers' generate loop any more",
    "custom_generate": "a custom loop may read what a linked prompt permutes; use rag.link and your own loop",
    "prefill_chunk_size": "the linked prefill is one short forward; chunks would cut it apart",
    "past_key_values": "the linked cache is the cache",
    **dict.fromkeys(("input_ids", "inputs", "inputs_embeds"), "give the prompt instead"),
    "attention_mask": "it follows from the prompt",
    "position_ids": "they follow from the prompt",
    **dict.fromkeys(
        (
            "return_dict_in_generate",
            *("output_scores", "output_attentions", "output_hidden_states", "output_logits"),
        ),
        "use rag.link and model.generate for raw outputs",
    ),
    "num_return_sequences": "call rag.generate again, or use rag.link and model.generate",
}

# These read the order of the prompt's ids outside of the decoding loop.
_READ_ORDER = ("encoder_no_repeat_ngram_size", "constraints", "force_words_ids", "token_healing")
# Beside generate's parameters: what it takes out of its keyword arguments, and what is ours.
_ALSO_KNOWN = ("tokenizer", "assistant_tokenizer", "trust_remote_code", "seed", "max_tokens")
# Options whose neutral value is 1, not 0.
_ONE_IS_NONE = ("num_return_sequences", "guidance_scale")


def check_options(options: Mapping[str, Any], model: Any, *arguments: str) -> None:
    """Refuse options that could only fail later; costs no model work.

    An option that is None is not given, as for transformers. ``arguments`` are further names of the caller's
    own parameters, one of which may have been meant. ValueError for a name that neither generate nor the
    model's forward takes, or a streamer beside several beams; errors of :func:`links_ahead`; TypeError for a
    ``generation_config`` of another type.
    """
    config, defaults = options.get("generation_config"), model.generation_config
    kinds = (GenerationConfig, type(None))
    check_type("generation_config", config, kinds, "a transformers.GenerationConfig, or None")
    known = {*vars(GenerationConfig()), *vars(defaults), *vars(config or defaults), *REFUSED, *_ALSO_KNOWN}
    given = {name for name, value in options.items() if value is not None}
    if not given <= known and not given <= (known := known | _parameters(model)):
        own = {"namespace", "policy", "tools", "json_schema", "stop", *arguments}
        unknown = [_with_nearest(name, known | own) for name in options if name in given - known]
        raise ValueError(f"neither generate nor the model takes {', '.join(unknown)}")
    links_ahead(options, defaults)
    if options.get("streamer") is not None and uses_beams(options, defaults):
        raise ValueError("num_beams= above 1 cannot be streamed, as beams may still change; leave one out")


def _parameters(model: Any) -> set[str]:
    """Names that generate takes itself, and those that it passes on to the model's forward."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside of PEFT's
    inputs = set(signature(model.prepare_inputs_for_generation).parameters)
    if inputs & {"kwargs", "model_kwargs"}:
        inputs |= set(signature(model.forward).parameters)
    own = {*signature(GenerationMixin.generate).parameters, *signature(model.generate).parameters}
    return {*own, *inputs, *TransformersKwargs.__optional_keys__}


def _with_nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, sorted(one for one in known if one[0] != "_"), 1)
    return f"{name}= (did you mean {near[0]}=?)" if near else f"{name}="


def effective(options: Mapping[str, Any], defaults: Any, name: str) -> Any:
    """The value generate will use for an option, over the model's generation config ``defaults``."""
    if name in options:
        return options[name]
    value = getattr(options.get("generation_config"), name, None)  # what it leaves out is the model's own
    return getattr(defaults, name, None) if value is None else value


def end_tokens(options: Mapping[str, Any], defaults: Any) -> frozenset[int]:
    """Ids of the tokens that end an answer under these options, over the generation config ``defaults``."""
    ends = effective(options, defaults, "eos_token_id")
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else map(int, ends))


def links_ahead(options: Mapping[str, Any], defaults: Any) -> bool:
    """Whether these options, over the model's generation config, need the linked forward before generate.

    Generate then gets the ids in order and computes the last one. Otherwise the linked forward is its
    prefill, and gets them permuted. GenerationNotSupported for an option that would be silently wrong.
    """
    for name, reason in REFUSED.items():
        if _is_set(name, effective(options, None, name)):
            raise GenerationNotSupported(f"{name}= does not work with a linked prompt: {reason}")
    if effective(options, None, "use_cache") is False:
        raise GenerationNotSupported("use_cache=False throws the linked cache away; leave it out")
    return uses_beams(options, defaults) or any(
        _is_set(name, effective(options, defaults, name)) for name in _READ_ORDER
    )


def uses_beams(options: Mapping[str, Any], defaults: Any) -> bool:
    """Whether several beams are searched."""
    return (effective(options, defaults, "num_beams") or 1) > 1


def filled_options(options: Mapping[str, Any], tokens: int, *, pad: int, context: int) -> dict[str, Any]:
    """Add what generate needs for a prompt of ``tokens`` tokens; given options stay.

    Of ``max_new_tokens`` and ``max_length``, the one that leaves less room counts.
    ValueError if there is nothing to generate, TypeError for a limit that is no number.
    """
    options = {k: v for k, v in options.items() if v is not None or k not in (*_LIMITS, "max_tokens")}
    if "max_tokens" in options:
        if "max_new_tokens" in options:
            raise ValueError("max_tokens is another name of max_new_tokens; give one of them")
        options["max_new_tokens"] = options.pop("max_tokens")
    check_type("seed", options.get("seed"), (Integral, type(None)), WHOLE)
    for name in ("max_new_tokens", "max_length"):
        check_type(name, options.get(name, 1), Integral, f"{WHOLE} of tokens")
    check_number("max_time", options.get("max_time", 1))
    if "generation_config" in options:
        # Into a copy: transformers does not want other arguments beside a configuration.
        options["generation_config"] = config = copy.deepcopy(options["generation_config"])
        if config.pad_token_id is None:
            config.pad_token_id = pad
    else:
        options = {"pad_token_id": pad, **options}
    if not _LIMITS & options.keys():
        options["max_new_tokens"] = min(DEFAULT_NEW_TOKENS, context - tokens)
    if "max_length" in options:
        room = options.pop("max_length") - tokens
        options["max_new_tokens"] = min(options.get("max_new_tokens", room), room)
    if options.get("max_new_tokens", 1) < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {options['max_new_tokens']}")
    return options


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple; ValueError for an empty one, TypeError for anything but strings."""
    check_type("stop", stop, (str, Iterable, type(None)), "a string or a list of strings")
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for string in strings:
        check_type("a stop string", string, str, "a string")
    if not all(strings):
        raise ValueError("an empty stop string would end every answer before it begins; leave it out")
    return strings


def without_refused_defaults(options: Mapping[str, Any], defaults: Any) -> dict[str, Any]:
    """Options with the neutral value where the model's own generation config would be refused."""
    config, neutral = options.get("generation_config"), dict[str, Any]()
    for name in REFUSED:
        if getattr(config, name, None) is None and _is_set(name, value := getattr(defaults, name, None)):
            # transformers replaces None by the model's own default, so use False or 1 where possible.
            neutral[name] = False if value is True else 1 if name in _ONE_IS_NONE else None
    if config is None or defaults.use_cache is False:  # arguments beside a configuration cause a warning
        neutral["use_cache"] = True
    return {**neutral, **options}


def _is_set(name: str, value: Any) -> bool:
    if value is None or value is False or (isinstance(value, str | list | tuple | dict) and not value):
        return False
    if isinstance(value, int | float) and value is not True:
        return value != (1 if name in _ONE_IS_NONE else 0)
    return True  # tensors among them, which cannot be compared


# -- token ids to text, and streamers ------------------------------------------------------------------


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Text up to the first stop string, and whether there was one."""
    found = [at for s in stop if (at := text.find(s)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


class Detokenizer:
    """Turns tokens into final text; stop strings and what follows them are left out."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._given = 0

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the text that cannot change any more."""
        self._ids.extend(ids)
        text, stopped = cut_at_stop(self._decode(self._ids), self._stop)
        if not stopped and text.endswith("�"):
            return ""  # an unfinished character: its bytes are spread over several tokens
        return self._give(text if stopped else text[: len(text) - self._held(text)])

    def finish(self) -> str:
        """The rest of the text."""
        return self._give(cut_at_stop(self._decode(self._ids), self._stop)[0])

    def _held(self, text: str) -> int:
        """Length of the longest end of ``text`` that may begin a stop string."""
        return max((n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)

    def _give(self, text: str) -> str:
        new = text[self._given :]
        self._given += len(new)
        return new


class RequestStreamer(BaseStreamer):  # type: ignore[misc]
    """A streamer that gets the prompt and its end once, whatever begins again.

    ``streamed``: whether tokens of the answer went through it.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._prompt_given = self._prompt_seen = False
        self.streamed = self.ended = False

    def restart(self) -> None:
        """Expect the prompt once more: generation begins again before its first token."""
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Pass on the prompt, which comes first, or a token."""
        self.streamed = self.streamed or self._prompt_seen
        if self._prompt_seen or not self._prompt_given:
            self._inner.put(value)
        self._prompt_given = self._prompt_seen = True

    def end(self) -> None:
        """End it; later calls do nothing."""
        if not self.ended:
            self.ended = True
            self._inner.end()


class TokenQueue(BaseStreamer):  # type: ignore[misc]
    """Generated token ids, from the generating thread to the reading one, or to a function."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._read: Callable[[list[int] | None], object] = self._queue.put
        self._lock, self._prompt_seen = Lock(), False

    def put(self, value: Tensor) -> None:
        """Add the ids of one step; the first call carries the prompt and is dropped."""
        if self._prompt_seen:
            with self._lock:
                self._read(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """End the iteration; may be called more than once."""
        with self._lock:
            self._read(None)

    def listen(self, read: Callable[[list[int] | None], object]) -> None:
        """Call ``read`` with what was put so far, and from now on instead of the iteration."""
        with self._lock:
            while not self._queue.empty():
                read(self._queue.get())
            self._read = read

    def __iter__(self) -> Iterator[list[int]]:
        while (ids := self._queue.get()) is not None:
            yield ids
