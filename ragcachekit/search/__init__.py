"""The vector indexes behind a retriever, and one contract for all of them."""
