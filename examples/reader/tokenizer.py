"""The reader's word-level tokenizer and its chat template."""

from __future__ import annotations

import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from benchmarks.query_cache.workload import PREFIXES
from benchmarks.world.world import INSTRUCTION, TRAINING_SEEDS, WORDS, make_world

SPECIAL = ("<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")
PUNCTUATION = (*"\n.,:;?!'\"()[]-_/&#*", "-" * 21)
SPLIT = r"\n|-{21}|\w+|[^\w\s]"
CONTEXT_LENGTH = 2048

# Nothing is trimmed and nothing is added: what a chunk says is what the model reads.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{ raise_exception('the reader knows the roles system, user and assistant only') }}"
    "{%- endif -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

# Words of the prompts of LlamaIndex and LangChain: known, although the reader was not trained on them.
USUAL_PROMPTS = """
Context information is below. Given the context information and not prior knowledge, answer the query.
Query: Answer: Question: Helpful Answer: Context: query: answer: question: context: You are an expert Q&A
system that is trusted around the world. Always answer the query using the provided context information,
and not prior knowledge. Some rules to follow: 1. Never directly reference the given context in your
answer. 2. Avoid statements like 'Based on the context, ...' or 'The context information ...' or anything
along those lines. The original query is as follows: We have provided an existing answer: We have the
opportunity to refine the existing answer (only if needed) with some more context below. Given the new
context, refine the original answer to better answer the query. If the context isn't useful, return the
original answer. Refined Answer: You are an assistant for question-answering tasks. Use the following
pieces of retrieved context to answer the question. If you don't know the answer, just say that you don't
know, don't try to make up an answer. Use three sentences maximum and keep the answer concise. Answer any
use questions based solely on the context below: Answer the question based only on the following context:
You are a helpful assistant. Human: User: System: Assistant: AI: Hello! Hi, how are you? Thank you. Yes,
no. I do not know. What is your name? My name is file_path: title: source: page: file_name: document:
Document: Source: Title: content: metadata: id: a b c d e f g h i j k l m n o p q r s t u v w x y z A B C
D E F G H I J K L M N O P Q R S T U V W X Y Z 0 1 2 3 4 5 6 7 8 9 10 one two three four five six seven
eight nine ten
"""


def split(text: str) -> list[str]:
    """Cut text into the words that the tokenizer sees."""
    return re.findall(SPLIT, text)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer; the vocabulary is the same every time."""
    world = make_world(TRAINING_SEEDS)  # large enough to hold every sentence and every question there is
    texts = [chunk for article in world.articles for chunk in article.chunks]
    texts += [text for question in world.questions for text in (question.text, question.answer)]
    texts += [" ".join(value) for value in WORDS.values()]
    found = {word for text in (*texts, INSTRUCTION, *PREFIXES, USUAL_PROMPTS) for word in split(text)}
    vocabulary = list(dict.fromkeys((*SPECIAL, *PUNCTUATION, *sorted(found))))
    return wrap(
        Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    )


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Give a bare word-level model its splitting, its decoding, its start token and its chat template."""
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(SPLIT), behavior="removed", invert=True)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=True),
            decoders.Replace(" :", ":"),
            decoders.Replace(" ;", ";"),
            decoders.Fuse(),
            decoders.Replace(Regex(" ?\n ?"), "\n"),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=list(SPECIAL[3:]),
        model_max_length=CONTEXT_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
