"""Tokenizers trained on the spot, and a tiny model that speaks their tokens."""

import functools
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from families import SIZES, sharpened

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
WORDS = "the a of in capital river town where is does flow Berlin Paris Spree Seine Rome Tiber answer from"
CORPUS = [
    "Berlin is the capital of Germany. The river Spree flows in Berlin.",
    "Paris is the capital of France; the river Seine flows in Paris.",
    "Where does the river flow? Answer from the context.\n\nContext:\n",
    "system user assistant question answer ",
    WORDS,
] * 4
ONE = "Berlin is the capital of Germany. The river Spree flows in Berlin."
TWO = "Paris is the capital of France; the river Seine flows in Paris."
THREE = "Rome is the capital of Italy. The river Tiber flows in Rome, says the guide."
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _wrap(backend: Tokenizer, bos: bool) -> Any:
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=TEMPLATE,
    )


@functools.cache
def byte_level(bos: bool = True) -> Any:
    """GPT-2 style: bytes, no space of its own."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return _wrap(backend, bos)


@functools.cache
def sentencepiece(way: str = "metaspace") -> Any:
    """Llama 2 style: a space marker before every text; by pre-tokenizer or (``legacy``) by normalizer."""
    backend = Tokenizer(models.BPE(unk_token="<pad>", byte_fallback=False))
    if way == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    alphabet = sorted({c for text in CORPUS for c in text} - {" "} | {"▁"} | set("<>/|_"))
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=200, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return _wrap(backend, True)


def speaker(seed: int = 0, **changes: Any) -> Any:
    """A fresh tiny Llama over the byte-level vocabulary."""
    torch.manual_seed(seed)
    return sharpened(tf.LlamaForCausalLM(tf.LlamaConfig(**{**SIZES, "vocab_size": 340, **changes})))
