"""A stand-in for RagCache in plain Python: records its calls, counts words, reuses what it registered."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from ragcachekit import Answer, GenerateReport, LinkReport

WORDS = ("it", "is", "in", "the", "north", "of", "the", "town", "by", "the", "sea", ".")


class FakeStream:
    """Yields ``words`` one by one; ``gate`` lets a test hold the generation between two words."""

    def __init__(self, words, finish, gate=None):
        self._words, self._finish, self.gate = iter(words), finish, gate
        self._taken = []
        self.cancelled = threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        if self.gate is not None and self._taken:
            self.gate.wait(10)
        if self.cancelled.is_set():
            raise StopIteration
        word = next(self._words)
        self._taken.append(word)
        return word if len(self._taken) == 1 else " " + word

    @property
    def answer(self):
        return self._finish(self._taken, "cancelled" if self.cancelled.is_set() else "stop")

    def cancel(self):
        self.cancelled.set()

    close = cancel

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.cancel()


class FakeRequest:
    """A request that was answered at once."""

    def __init__(self, answer):
        self._answer = answer

    def result(self, timeout=None):
        return self._answer


class FakeEngine:
    def __init__(self, words=WORDS, gate=None):
        self.namespace, self.policy = "default", "lego:16"
        config = SimpleNamespace(_name_or_path="fake/model", max_position_embeddings=2048)
        self.model, self.tokenizer = SimpleNamespace(config=config), SimpleNamespace(chat_template="{{ }}")
        self.words, self.gate = words, gate
        self.calls, self.streams, self.registered, self.prefetched = [], [], [], []
        self.query_caches, self.orders, self.dropped, self.submitted = [], [], [], []

    def register(self, texts, *, namespace=None):
        texts = list(texts)
        self.registered.append((namespace, texts))
        return len(texts)

    def order(self, document, texts, *, starts=None, namespace=None):
        self.orders.append((namespace, document, list(texts), starts))

    def drop_order(self, texts, *, namespace=None):
        self.dropped.append((namespace, list(texts)))

    def add_query_cache(self, cache):
        self.query_caches.append(cache)

    def prefetch(self, chunks, *, namespace=None, system=None):
        self.prefetched.append((namespace, list(chunks)))

    def generate(self, prompt, *, namespace=None, policy=None, stop=None, **generate_kwargs):
        return self._finish(prompt, namespace, policy, stop, generate_kwargs)(self.words, "stop")

    def submit(self, prompt, *, wait=False, **options):
        self.submitted.append({"prompt": prompt, "wait": wait})
        return FakeRequest(self.generate(prompt, **options))

    def generate_batch(self, prompts, **options):
        return [self.generate(prompt, **options) for prompt in prompts]

    def stream(self, prompt, *, namespace=None, policy=None, stop=None, **generate_kwargs):
        finish = self._finish(prompt, namespace, policy, stop, generate_kwargs)
        self.streams.append(FakeStream(self.words, finish, self.gate))
        return self.streams[-1]

    def count_tokens(self, text):
        return len(text.split())

    def _finish(self, prompt, namespace, policy, stop, generate_kwargs):
        self.calls.append(
            {"prompt": prompt, "namespace": namespace, "policy": policy, "stop": stop, **generate_kwargs}
        )
        text = prompt if isinstance(prompt, str) else "\n".join(str(m["content"]) for m in prompt)
        known = {t for space, texts in self.registered for t in texts if space == namespace}
        reused = sum(len(chunk.split()) for chunk in known if chunk in text)

        def finish(words, reason):
            link = LinkReport(
                policy or self.policy,
                "standalone",
                namespace or self.namespace,
                prompt_tokens=len(text.split()),
                approximate_tokens=reused,
            )
            report = GenerateReport(link, len(words), ttft_ms=1.0, total_ms=2.0, finish_reason=reason)
            return Answer(" ".join(words), tuple(range(len(words))), report)

        return finish
