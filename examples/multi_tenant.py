"""Two tenants on one engine, with separate caches: `python examples/multi_tenant.py [--model PATH]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ragcachekit import RagCache, StoreConfig

HANDBOOK = (
    "Holidays are requested two weeks ahead. The head of the team answers within three days, and unused days "
    "may be taken until the end of March."
)
QUESTION = "How long ahead are holidays requested?"
PROMPT = [{"role": "user", "content": f"Answer from the context.\n\n{HANDBOOK}\n\n{QUESTION}"}]
QUOTAS = {"acme": 64 << 20, "*": 16 << 20}  # bytes in each tier; * is every other tenant


def ask(rag: RagCache, tenant: str) -> int:
    """Answer the question for one tenant; returns the number of reused tokens of the handbook."""
    answer = rag.generate(PROMPT, namespace=tenant, max_new_tokens=16)
    chunks = answer.report.link.chunks
    reused = sum(use.tokens for use in chunks if use.source != "computed")
    print(f"{tenant}: {reused} of {sum(use.tokens for use in chunks)} tokens of the handbook reused")
    return reused


def main(arguments: Sequence[str] | None = None) -> None:
    """Encode for one tenant, ask for two, then forget one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sample", help="folder or hub id")
    model = parser.parse_args(arguments).model
    store = StoreConfig(host_bytes=256 << 20, quotas=QUOTAS)
    with RagCache.from_pretrained(model, policy="lego:4", store=store, cold="never") as rag:
        rag.encode([HANDBOOK], prompt=PROMPT, namespace="acme")
        rag.register([HANDBOOK], namespace="umbrella")  # the same text, but nothing crosses a namespace
        ask(rag, "acme")
        ask(rag, "umbrella")
        rag.encode([HANDBOOK], prompt=PROMPT, namespace="umbrella")
        ask(rag, "umbrella")
        print(f"forgotten: {rag.forget(namespace='umbrella')} entries of umbrella")
        ask(rag, "acme")


if __name__ == "__main__":
    main()
