"""A stand-in for RagCache in plain Python: records its calls, counts words, reuses what it registered."""

import threading
from types import SimpleNamespace

from ragcachekit import Answer, CancelScope
from ragcachekit.reports import GenerateReport, LinkReport

WORDS = ("it", "is", "in", "the", "north", "of", "the", "town", "by", "the", "sea", ".")


class FakeRequest:
    """A request that is answered word by word while an event loop looks on, or at once."""

    def __init__(self, words, finish, streamer=None, gate=None):
        self._words, self._finish, self._streamer, self._gate = words, finish, streamer, gate
        self.taken, self.callbacks, self._done = [], [], threading.Event()
        self._cancel, scope = threading.Event(), CancelScope()
        # As of a real request: by itself, or by the scope of the call that submitted it.
        self.cancelled = SimpleNamespace(is_set=lambda: self._cancel.is_set() or scope.requested)
        self.detokenizer = SimpleNamespace(push=lambda ids: ids[0])
        if streamer is None and gate is None:
            self._run()
        else:
            threading.Thread(target=self._run).start()

    def _run(self):
        if self._streamer is not None:
            self._streamer.put(FakeIds(()))
        for number, word in enumerate(self._words):
            if self._gate is not None and number:
                self._gate.wait(10)
            if self.cancelled.is_set():
                break
            self.taken.append(word)
            if self._streamer is not None:
                self._streamer.put(FakeIds([" " + word if number else word]))
        self._answer = self._finish(self.taken, "cancelled" if self.cancelled.is_set() else "stop")
        self._done.set()
        if self._streamer is not None:
            self._streamer.end()
        for callback in self.callbacks:
            callback(self)

    def result(self, timeout=None):
        assert self._done.wait(10)
        return self._answer

    def stream(self):
        try:
            for number, word in enumerate(self.taken):
                yield " " + word if number else word
        except GeneratorExit:
            self.cancel()
            raise

    def listen(self, read):
        self._streamer.listen(read)

    def add_done_callback(self, callback):
        self.callbacks.append(callback)
        if self._done.is_set():
            callback(self)

    def cancel(self):
        self._cancel.set()


class FakeIds(list):
    """Stands in for a tensor of token ids."""

    def flatten(self):
        return self

    tolist = flatten


class FakeEngine:
    def __init__(self, words=WORDS, gate=None):
        self.namespace, self.policy = "default", "lego:16"
        config = SimpleNamespace(name_or_path="fake/model", max_position_embeddings=2048)
        self.model, self.tokenizer = SimpleNamespace(config=config), SimpleNamespace(chat_template="{{ }}")
        self.words, self.gate, self.renders_tools = words, gate, False
        self.queue = SimpleNamespace(has_room=lambda: True, refuse_own_thread=lambda: None)
        self.calls, self.streams, self.registered, self.prefetched = [], [], [], []
        self.query_caches, self.submitted = [], []

    def register(self, texts, *, namespace=None, sources=None):
        texts = list(texts)
        self.registered.append((namespace, texts))
        return len(texts)

    def add_query_cache(self, cache):
        self.query_caches.append(cache)

    def prefetch(self, chunks, *, namespace=None, system=None):
        self.prefetched.append((namespace, list(chunks)))

    def generate(self, prompt, *, namespace=None, policy=None, stop=None, **generate_kwargs):
        return self._finish(prompt, namespace, policy, stop, generate_kwargs)(self.words, "stop")

    def submit(self, prompt, *, wait=False, **options):
        self.submitted.append({"prompt": prompt, "wait": wait})
        streamer = options.pop("streamer", None)
        asked = {"namespace": None, "policy": None, "stop": None} | options
        named = [asked.pop(name) for name in ("namespace", "policy", "stop")]
        request = FakeRequest(self.words, self._finish(prompt, *named, asked), streamer, self.gate)
        self.streams.append(request)
        return request

    def generate_batch(self, prompts, **options):
        return [self.generate(prompt, **options) for prompt in prompts]

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
