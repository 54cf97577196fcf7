"""``python -m ragcachekit``."""

from ragcachekit.commands.app import main

main()
