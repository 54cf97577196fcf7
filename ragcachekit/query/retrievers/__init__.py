"""What the retriever wrappers of all frameworks share."""
