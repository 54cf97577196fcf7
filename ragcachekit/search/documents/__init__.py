"""Documents with their vectors: text and metadata by id, filters, and persistence."""
