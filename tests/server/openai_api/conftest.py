import openai
import pytest

from ragcachekit.server import ServerConfig, create_app
from server_kit import LONG, MODEL, engine, served
from speaking import byte_level
from tool_kit import scripted, with_tools


@pytest.fixture(scope="package")
def rag():
    with engine(with_tools(byte_level())) as rag:
        yield rag


@pytest.fixture(scope="package")
def url(rag):
    with served(create_app(rag, ServerConfig(model_name=MODEL, heartbeat=0.05))) as url:
        yield url


@pytest.fixture(scope="package")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=LONG) as client:
        yield client


@pytest.fixture
def saying(rag, monkeypatch):
    """Makes the model say a text."""
    submit = rag.submit

    def say(text):
        allowed = scripted(rag.tokenizer, lambda _: text)
        own = {"prefix_allowed_tokens_fn": allowed, "policy": "full", "max_new_tokens": 240}
        monkeypatch.setattr(rag, "submit", lambda *a, **o: submit(*a, **{**o, **own}))

    return say
