"""Facts as documents, and embeddings that count words; shared by the tests of both integrations."""

import asyncio
import re
import subprocess
import sys
import threading
import zlib

from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate

FACTS = (
    "Ada Lind was born in Bern. She works as a baker and keeps two grey cats in her kitchen.",
    "Bob Roth was born in Rome. This person also plays the cello every Sunday in the old church.",
    "Norda is a company in Oslo. It builds small boats of wood and sells them along the coast.",
    "Oslo is a town in the north. Its harbour is frozen for a month in most winters.",
    "Carl Weiss was born in Kiel. He works for Norda and paints the names on the boats.",
    "Rome is a town in the south. Its oldest bridge is crossed by many thousand people a day.",
)


PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from the context only.\n\n{context}"), ("human", "{input}")]
)


def asked(chain, question):
    """The chain's result, and the usage of the one model in it."""
    with get_usage_metadata_callback() as callback:
        result = chain.invoke(question)
    (usage,) = callback.usage_metadata.values()
    return result, usage


class Calls(list):
    """A list of calls that says of itself: it decides no result."""

    def cache_key_parts(self):
        return ()


class AtTheEnd:
    """A filter that accepts everything; calls ``work`` at the document that was added last."""

    def __init__(self, work):
        self.work = work

    def __call__(self, document):
        if document.metadata["row"] == len(FACTS) - 1:
            self.work()
        return True

    def cache_key_parts(self):
        return ()


def raising(error):
    raise error


class WordEmbeddings(Embeddings):
    """Counts of hashed words; remembers what it was asked to embed."""

    def __init__(self, width=64):
        self.width, self.asked = width, []

    def embed_query(self, text):
        self.asked.append(text)
        vector = [0.0] * self.width
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32(word.encode()) % self.width] += 1.0
        return vector

    def embed_documents(self, texts):
        vectors = [self.embed_query(text) for text in texts]
        del self.asked[-len(texts) :]
        return vectors

    async def aembed_query(self, text):
        return self.embed_query(text)


class Together:
    """A gate that opens when three calls wait at it and the loop has ticked twenty times meanwhile."""

    def __init__(self):
        self._three, self._begun, self.ticked = threading.Barrier(3), threading.Event(), threading.Event()

    def wait(self, timeout=None):
        self._begun.set()
        self._three.wait(10)
        assert self.ticked.wait(10)

    async def three_times(self, ask):
        ticking = asyncio.create_task(self._tick())
        answers = await asyncio.wait_for(asyncio.gather(*(ask(n) for n in range(3))), 20)
        await ticking
        return answers

    async def _tick(self):
        while not self._begun.is_set():
            await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0.001)
        self.ticked.set()


def deleted_elsewhere(path, name):
    """Another process deletes a document of the index."""
    code = "import sys\nfrom ragcachekit import DocumentIndex\n"
    code += "DocumentIndex(path=sys.argv[1]).delete([sys.argv[2]])"
    subprocess.run([sys.executable, "-c", code, str(path), name], check=True)
