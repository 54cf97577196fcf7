"""Vector indexes, and one contract for all of them."""
