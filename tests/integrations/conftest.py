"""A tiny random model with a trained byte-level tokenizer, word-count embeddings, a few documents."""

import logging
from pathlib import Path

import pytest
from integration_kit import FACTS, WordEmbeddings
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from llama_kit import Embedder

from benchmarks.world.reader_folder import READER
from families import sharpened
from snapshots_kit import LINEAR

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


def tiny(tokenizer, model, config, **special):
    import torch

    own = config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **special,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model(own).eval()


@pytest.fixture(scope="session")
def tiny_model(tiny_tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    return tiny(tiny_tokenizer, LlamaForCausalLM, LlamaConfig, num_hidden_layers=2)


@pytest.fixture(scope="session")
def tiny_hybrid(tiny_tokenizer):
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    with torch.no_grad():
        return sharpened(
            tiny(tiny_tokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig, num_hidden_layers=3, **LINEAR)
        )


@pytest.fixture(scope="session")
def digests(tmp_path_factory):
    """One folder of file digests and passed checks for all engines: the check of a model runs once."""
    return tmp_path_factory.mktemp("digests")


@pytest.fixture
def rag(request, tiny_tokenizer, digests, caplog):
    """The real engine around the tiny model, with empty caches; a failure that was only logged shows.

    Parametrised with ``prefix`` it has the hybrid.
    """
    from ragcachekit import RagCache

    grade = getattr(request, "param", "linked")
    model = request.getfixturevalue("tiny_model" if grade == "linked" else "tiny_hybrid")
    engine = RagCache(
        model, tiny_tokenizer, policy="lego:4", encoder="standalone", cold="now", cache_dir=digests
    )
    assert engine.grade == grade
    yield engine
    engine.close()
    logged = [r.message for r in caplog.get_records("call") if r.levelno >= logging.WARNING]
    assert [said for said in logged if "falling back to its reference PyTorch" not in said] == []


@pytest.fixture(scope="session")
def reader(digests):
    """The engine around the trained reader of the repository; chunks are encoded at once."""
    from ragcachekit import RagCache

    folder = Path(READER)
    engine = RagCache.from_pretrained(folder, policy="lego:4", cold="now", cache_dir=digests)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def hybrid(tiny_hybrid, tiny_tokenizer, digests):
    """An engine around the hybrid that is not emptied between tests."""
    from ragcachekit import RagCache

    engine = RagCache(tiny_hybrid, tiny_tokenizer, cold="now", cache_dir=digests)
    yield engine
    engine.close()
