"""The benchmarks over a small sample world: shared fixtures."""

from command_fixtures import (  # noqa: F401
    command,
    corpus,
    minilm,
    one_minilm,
    prepared,
    proofs,
    reader_copy,
    world,
)
