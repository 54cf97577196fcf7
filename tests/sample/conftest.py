"""SmolLM2-135M-Instruct with its own tokenizer and chat template, as users have it."""

import pytest

from ragcachekit import RagCache
from ragcachekit.model.loading import sample_model


@pytest.fixture(scope="session")
def folder():
    return sample_model()


@pytest.fixture(scope="session")
def digests(tmp_path_factory):
    return tmp_path_factory.mktemp("digests")


@pytest.fixture(scope="session")
def loaded(folder):
    """Model and tokenizer, which no engine has touched yet."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def engine(loaded, digests):
    with RagCache(*loaded, policy="lego:4", encoder="standalone", cold="now", cache_dir=digests) as engine:
        yield engine


@pytest.fixture
def rag(engine):
    """The engine, which knows nothing yet."""
    engine.forget()
    return engine
