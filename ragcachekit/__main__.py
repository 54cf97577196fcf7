"""``python -m ragcachekit``."""

from ragcachekit.cli import main

main()
