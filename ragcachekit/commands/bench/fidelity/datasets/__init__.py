"""Datasets of questions, by the format of their file."""
