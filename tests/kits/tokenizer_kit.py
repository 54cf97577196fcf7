"""Small tokenizers of the kinds that models use, trained on the project's documentation."""

import pathlib
import tempfile
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

DOCS = pathlib.Path(__file__).parents[2] / "docs"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 2500

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

KINDS = ("gpt2", "llama3", "qwen", "o200k", "llama2", "gemma", "wordpiece", "slow")


@cache
def corpus() -> tuple[str, ...]:
    """The documentation's pages."""
    return tuple(path.read_text() for path in sorted(DOCS.glob("*.md")))


@cache
def paragraphs(chars: int = 900) -> tuple[str, ...]:
    """Passages of about so many characters, as splitters cut them: whole paragraphs."""
    out, run = [], ""
    for page in corpus():
        for part in page.split("\n\n"):
            run = f"{run}\n\n{part.strip()}".strip()
            if len(run) >= chars:
                out.append(run)
                run = ""
    return tuple(dict.fromkeys(out))


@cache
def tokenizer_of(kind: str) -> Any:
    """A tokenizer of one of :data:`KINDS`."""
    if kind == "slow":
        return _slow()
    tokenizer = _MAKERS[kind]()
    options: dict[str, Any] = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    if kind == "wordpiece":
        options |= {"cls_token": "<s>", "sep_token": "</s>"}
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, extra_special_tokens=["<|im_start|>", "<|im_end|>"], **options
    )
    made.chat_template = TEMPLATE
    return made


def _bytes(pattern: str | None, normalizer: Any = None, bos: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.decoder = decoders.ByteLevel()
    # As GPT-2's and Llama 3's: the first trims spaces off the offsets.
    tokenizer.post_processor = _with_bos(tokenizer) if bos else processors.ByteLevel(trim_offsets=True)
    return tokenizer


def _metaspace(prepend: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    # Trained on words; Llama 2 itself does not split before merging.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if prepend else "never")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator((line for page in corpus() for line in page.splitlines()), trainer)
    space = normalizers.Replace(" ", "▁")
    if prepend:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    else:
        tokenizer.normalizer = space
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.post_processor = _with_bos(tokenizer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def _with_bos(tokenizer: Tokenizer) -> Any:
    return processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])


def _slow() -> Any:
    ids = tokenizer_of("wordpiece").get_vocab()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "vocab.txt")
        file.write_text("\n".join(sorted(ids, key=ids.__getitem__)))
        made = BertTokenizerLegacy(
            str(file),
            unk_token="<unk>",
            cls_token="<s>",
            sep_token="</s>",
            pad_token="</s>",
            mask_token="<unk>",
            extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        )
    made.chat_template = TEMPLATE
    return made


_MAKERS = {
    "gpt2": lambda: _bytes(None),
    "llama3": lambda: _bytes(LLAMA_3, bos=True),
    "qwen": lambda: _bytes(QWEN, normalizers.NFC()),
    "o200k": lambda: _bytes(O200K),
    "llama2": lambda: _metaspace(prepend=True),
    "gemma": lambda: _metaspace(prepend=False),
    "wordpiece": _wordpiece,
}
