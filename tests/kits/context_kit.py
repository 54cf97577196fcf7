"""An engine that only notes what contexts do to it."""

import threading
from types import SimpleNamespace

ONE, TWO, THREE = (f"The text of chunk {number}." for number in range(3))


class Engine:
    """Notes what is encoded and forgotten; chunk ids are the texts' lengths."""

    tokenizer, grade = None, "linked"
    queue = SimpleNamespace(running=0)

    def __init__(self) -> None:
        self.registered: list[tuple[str, ...]] = []
        self.turns: list[tuple[str, list[str]]] = []
        self.encoded: set[tuple[str, str]] = set()
        self.fails: Exception | None = None
        self.retained = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def count_tokens(self, text):
        return len(text)

    def register(self, texts, *, namespace):
        self.registered.append(tuple(texts))

    def encode(self, texts, *, namespace, system, retain=None):
        self.turns.append((namespace, texts))
        self.retained.append(retain)
        self.encoded |= {(namespace, text) for text in texts}
        self.begun.set()
        assert self.go_on.wait(10)
        if self.fails:
            raise self.fails
        return [f"{namespace}-{text}" for text in texts]

    def forget(self, *, texts, namespace):
        if self.fails:
            raise self.fails
        self.encoded -= {(namespace, text) for text in texts}


async def make(store, tenant, *chunks, seconds=60.0, **options):
    lifetime = lambda now: now + seconds  # noqa: E731
    return await store.create(tenant, chunks, model="m", lifetime=lifetime, **options)
