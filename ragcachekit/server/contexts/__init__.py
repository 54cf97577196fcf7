"""Prompts that clients store under a name: context caching."""
