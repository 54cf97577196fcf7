"""Encode documents to disk now, answer from there later: `python examples/offline_precompute.py`.

Run `--step encode` on a build machine or in a nightly job, and `--step answer` where questions come in.
Both need the same model, policy and system text, and the folder `--kv`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ragcachekit import Chunk, Prompt, RagCache, StoreConfig, Text

SYSTEM = "Answer the question from the context.\n\n"
DOCUMENTS = (
    "The library opens at nine. On Wednesdays it stays open until eight in the evening, for all who work.",
    "Books are lent for four weeks. They can be renewed twice, unless another reader has asked for them.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Encode, answer, or both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sample", help="folder or hub id")
    parser.add_argument("--kv", default="kv", help="folder of the KV on disk")
    parser.add_argument("--step", choices=("encode", "answer", "both"), default="both")
    given = parser.parse_args(arguments)
    model = given.model

    def engine(host_bytes: int) -> RagCache:
        store = StoreConfig(host_bytes=host_bytes, disk_path=given.kv, disk_bytes=4 << 30)
        return RagCache.from_pretrained(model, policy="sensitive:0.1", encoder="average:2", store=store)

    if given.step in ("encode", "both"):
        with engine(host_bytes=0) as rag:  # straight to the disk
            rag.encode(DOCUMENTS, system=SYSTEM, progress=True)
            disk = rag.stats()[0]
            print(f"{disk.entries} entries, {disk.nbytes / 1e6:.1f} MB on {disk.tier}")
    if given.step in ("answer", "both"):
        with engine(host_bytes=1 << 30) as rag:
            chunks = [part for text in DOCUMENTS for part in (Chunk(text), Text("\n\n"))]
            answer = rag.generate(
                Prompt([Text(SYSTEM), *chunks, Text("How long are books lent?")]), max_new_tokens=16
            )
            print(answer.text)
            for use in answer.report.link.chunks:
                print(use)


if __name__ == "__main__":
    main()
