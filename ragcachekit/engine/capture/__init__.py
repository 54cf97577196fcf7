"""Copies of rows that answered prompts computed, for the prompts that follow."""
