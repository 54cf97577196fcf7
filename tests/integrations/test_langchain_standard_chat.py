"""langchain-tests' standard suites for chat models, offline on the trained reader."""

import pytest
from integration_kit import FACTS
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_ragcachekit import ChatRagCache

DETAILS = ["cache_read_input"]


class OnTheReader:
    """What the reader can do: it reads text. No tools, no structured output, no other model."""

    @pytest.fixture(autouse=True)
    def _engine(self, reader):
        self.rag = reader

    @property
    def chat_model_class(self):
        return ChatRagCache

    @property
    def chat_model_params(self):
        return {"cache": self.rag}

    @property
    def has_tool_calling(self):
        return False

    @property
    def has_structured_output(self):
        return False

    @property
    def supports_model_override(self):
        return False


class TestUnit(OnTheReader, ChatModelUnitTests):
    pass


class TestIntegration(OnTheReader, ChatModelIntegrationTests):
    @property
    def chat_model_params(self):
        # The reader may end its answer to a "Hello" at once; the suite wants to see some text.
        return {"cache": self.rag, "max_tokens": 8, "generate_kwargs": {"min_new_tokens": 4}}

    @property
    def supported_usage_metadata_details(self):
        return {"invoke": DETAILS, "stream": DETAILS}

    def invoke_with_cache_read_input(self, *, stream=False):
        chunk = FACTS[0]
        self.rag.encode([chunk])
        model = ChatRagCache(**self.chat_model_params)
        prompt = f"Answer from the context.\n\n{chunk}\n\nWhere was Ada Lind born?"
        if stream:
            chunks = list(model.stream(prompt))
            message = sum(chunks[1:], chunks[0])
        else:
            message = model.invoke(prompt)
        # The suite asks for a number only; here it must be that of the chunk's reused tokens.
        reused = message.usage_metadata["input_token_details"]["cache_read"]
        assert self.rag.count_tokens(chunk) - 4 <= reused < message.usage_metadata["input_tokens"]
        return message
