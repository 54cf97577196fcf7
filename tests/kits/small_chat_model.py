"""What small models can do, for langchain-tests' suites: they read text. No tools, no other model."""

from langchain_ragcachekit import ChatRagCache

DETAILS = ["cache_read_input"]


class SmallChatModel:
    """Base of the suites' classes; ``rag`` is the engine, set by a fixture."""

    @property
    def chat_model_class(self):
        return ChatRagCache

    @property
    def chat_model_params(self):
        return {"rag": self.rag}

    @property
    def has_tool_calling(self):
        return False

    @property
    def has_structured_output(self):
        return False

    @property
    def supports_model_override(self):
        return False

    def read_from_cache(self, chunk, question, stream):
        """The answer to a question about a chunk that was encoded ahead."""
        prompt = f"Answer from the context.\n\n{chunk}\n\n{question}"
        self.rag.encode([chunk], prompt=[{"role": "user", "content": prompt}])
        model = ChatRagCache(**self.chat_model_params)
        if stream:
            chunks = list(model.stream(prompt))
            message = sum(chunks[1:], chunks[0])
        else:
            message = model.invoke(prompt)
        # The suite asks for a number only; here it must be that of the chunk's reused tokens.
        reused = message.usage_metadata["input_token_details"]["cache_read"]
        assert self.rag.count_tokens(chunk) - 4 <= reused < message.usage_metadata["input_tokens"]
        return message
