"""Vector indexes, and a cache of their results for near-identical questions (Proximity)."""
