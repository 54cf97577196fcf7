"""langchain-tests' standard suites for chat models, offline on the trained reader and on a hybrid."""

import pytest
from integration_kit import FACTS
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from small_chat_model import DETAILS, SmallChatModel


class OnTheReader(SmallChatModel):
    @pytest.fixture(autouse=True)
    def _engine(self, reader):
        self.rag = reader


class TestUnit(OnTheReader, ChatModelUnitTests):
    pass


class TestIntegration(OnTheReader, ChatModelIntegrationTests):
    @property
    def chat_model_params(self):
        # The reader may end its answer to a "Hello" at once; the suite wants to see some text.
        return {"rag": self.rag, "max_tokens": 8, "generate_kwargs": {"min_new_tokens": 4}}

    @property
    def supported_usage_metadata_details(self):
        return {"invoke": DETAILS, "stream": DETAILS}

    def invoke_with_cache_read_input(self, *, stream=False):
        return self.read_from_cache(FACTS[0], "Where was Ada Lind born?", stream)


class TestUnitOnAHybrid(TestUnit):
    @pytest.fixture(autouse=True)
    def _engine(self, hybrid):
        self.rag = hybrid


class TestIntegrationOnAHybrid(TestIntegration):
    @pytest.fixture(autouse=True)
    def _engine(self, hybrid):
        self.rag = hybrid
