"""What encoding a chunk only after its n-th miss costs and saves, on drawn traces; no model runs.

A request computes what it misses in place. The chunk in the first place is kept as it is; others are encoded
after their n-th miss, which computes them once more. A hit saves all but the recomputed share.
Run: python benchmarks/encode_after.py
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from benchmarks.eviction.traces import TRACES, Trace, TraceShape

RECOMPUTED = 0.1
"""Share of a cached chunk that the policy computes again."""

CORPORA = {"small corpus": TraceShape(2000, 4000, 4, 250), "large corpus": TraceShape(20000, 4000, 4, 250)}


@dataclass
class Cost:
    """Tokens; ``net`` are those saved less those encoded, as a share of all chunk tokens."""

    total: int = 0
    saved: float = 0.0
    encoded: int = 0
    unused: int = 0

    @property
    def net(self) -> float:
        return (self.saved - self.encoded) / self.total


def replay(trace: Trace, after: int, capacity: int, capture: bool = True) -> Cost:
    """Serve the requests over a store of ``capacity`` tokens that evicts the least recently used."""
    store: OrderedDict[int, bool] = OrderedDict()  # document to whether its encoding was used
    misses: Counter[int] = Counter()
    cost, held = Cost(), 0
    for request in trace.requests:
        todo = []
        for place, document in enumerate(request):
            tokens = trace.tokens[document]
            cost.total += tokens
            if document in store:
                store[document] = True
                store.move_to_end(document)
                cost.saved += tokens * (1.0 if capture and place == 0 else 1 - RECOMPUTED)
            elif capture and place == 0:
                todo.append((document, True))
            else:
                misses[document] += 1
                if misses[document] >= after:
                    del misses[document]
                    todo.append((document, False))
        for document, is_free in todo:
            cost.encoded += 0 if is_free else trace.tokens[document]
            held += trace.tokens[document]
            store[document] = is_free
            while held > capacity:
                old, was_used = store.popitem(last=False)
                held -= trace.tokens[old]
                cost.unused += 0 if was_used else trace.tokens[old]
    cost.unused += sum(trace.tokens[document] for document, was_used in store.items() if not was_used)
    return cost


def main() -> None:
    """Print one table: per corpus, trace, room and n the shares of all chunk tokens, in percent."""
    print("| corpus | trace | room | first kept | n | saved | encoded | encoded in vain | net |")
    print("|---|---|---|---|---|---|---|---|---|")
    for corpus, shape in CORPORA.items():
        for name in ("zipf", "shifting", "local", "scan"):
            trace = TRACES[name](shape, 0)
            for room in (1.0, 0.1):
                for capture, after in ((False, 1), (True, 1), (True, 2), (True, 3), (True, 4)):
                    cost = replay(trace, after, int(room * trace.corpus_tokens), capture)
                    shares = (cost.saved / cost.total, cost.encoded / cost.total, cost.unused / cost.total)
                    cells = [*(f"{100 * share:.0f}" for share in shares), f"{100 * cost.net:.1f}"]
                    row = (corpus, name, f"{room:.0%}", "yes" if capture else "no", after, *cells)
                    print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
