"""What the choice of tokens is worth: bounds, budgets, and the choice of ``auto``."""
