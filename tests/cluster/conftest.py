"""The command line over a small corpus."""

from __future__ import annotations

from command_fixtures import command, corpus, world  # noqa: F401
