"""``python -m benchmarks``."""

from ragcachekit.bench.proofs_cli import main

main()
