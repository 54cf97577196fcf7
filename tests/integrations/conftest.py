"""A tiny random model with a trained byte-level tokenizer, word-count embeddings, a few documents."""

import logging
from pathlib import Path

import pytest
from integration_kit import FACTS, WordEmbeddings
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from llama_kit import Embedder

from benchmarks.world.reader_folder import READER

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def embeddings():
    return WordEmbeddings()


@pytest.fixture(scope="session")
def documents():
    return [
        Document(text, id=f"doc-{n}", metadata={"row": n, "tags": ["fact"]}) for n, text in enumerate(FACTS)
    ]


@pytest.fixture
def store(embeddings, documents):
    store = InMemoryVectorStore(embeddings)
    store.add_documents(documents)
    return store


@pytest.fixture
def embedder():
    return Embedder(asked=[])


@pytest.fixture(scope="session")
def tiny_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(FACTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<|pad|>", eos_token="<|im_end|>", chat_template=CHATML
    )


@pytest.fixture(scope="session")
def tiny_model(tiny_tokenizer):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    return model.eval()


@pytest.fixture(scope="session")
def digests(tmp_path_factory):
    """One folder of file digests and passed checks for all engines: the check of a model runs once."""
    return tmp_path_factory.mktemp("digests")


@pytest.fixture
def rag(tiny_model, tiny_tokenizer, digests, caplog):
    """The real engine around the tiny model, with empty caches; a failure that was only logged shows."""
    from ragcachekit import RagCache

    engine = RagCache(tiny_model, tiny_tokenizer, policy="lego:4", cold="now", cache_dir=digests)
    yield engine
    engine.close()
    assert [r.message for r in caplog.get_records("call") if r.levelno >= logging.WARNING] == []


@pytest.fixture(scope="session")
def reader(digests):
    """The engine around the trained reader of the repository; chunks are encoded at once."""
    from ragcachekit import RagCache

    folder = Path(READER)
    engine = RagCache.from_pretrained(folder, policy="lego:4", cold="now", cache_dir=digests)
    yield engine
    engine.close()
