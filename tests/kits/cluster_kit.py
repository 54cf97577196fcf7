"""Engines that actors open, which note what they do in files, and a corpus of any length."""

import hashlib
import os
import time
from collections import Counter
from functools import partial
from pathlib import Path

from ragcachekit import RagCache, StoreConfig
from ragcachekit.cluster.precompute import EncodingJob
from ragcachekit.types import chunk_id
from speaking import WORDS, byte_level, speaker

SYSTEM = "Answer from the context.\n\n"
TOKENS = byte_level()


class NotingCache(RagCache):
    """Appends the ids of what it is asked to encode to a file, a line per batch, before and after."""

    notes: Path
    seconds = 0.0

    def encode(self, texts, **options):
        ids = [id_of(text) for text in texts]
        note(self.notes, "begin", os.getpid(), *ids)
        time.sleep(self.seconds)
        found = super().encode(texts, **options)
        note(self.notes, "end", os.getpid(), *ids)
        return found


def note(path, *words):
    """Append one line, whole although several processes write."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (" ".join(map(str, words)) + "\n").encode())
    os.close(file)


def open_noting(store, notes, seconds=0.0):
    rag = NotingCache(
        speaker(), byte_level(), store=store, cold="never", encoder="system", policy="lego:4",
        cache_dir=notes.parent / "digests",
    )  # fmt: skip
    rag.notes, rag.seconds = notes, seconds
    note(notes, "open", os.getpid())
    return rag


def job(folder, notes, seconds=0.0):
    store = StoreConfig(host_bytes=0, disk_path=folder / "kv", disk_bytes=1 << 30)
    return EncodingJob(partial(open_noting, notes=notes, seconds=seconds), store, SYSTEM)


def corpus(count):
    """Chunks of 8 to 39 words with their ids."""
    words = WORDS.split()
    texts = [
        " ".join(
            [f"Chunk {n}.", *(words[(n * 7 + at * (n % 5 + 1)) % len(words)] for at in range(6 + n % 32))]
        )
        for n in range(count)
    ]
    return [(id_of(text), text) for text in texts]


def id_of(text):
    """The id of a chunk in the default namespace."""
    return chunk_id(tuple(TOKENS(text, add_special_tokens=False)["input_ids"]), "default")


def stored(folder):
    """Bytes' digest of every entry file, by name."""
    files = (folder / "kv").glob("*.safetensors")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def begun(notes):
    """How often each chunk was begun."""
    return Counter(one for batch in batches(notes) for one in batch)


def batches(notes):
    """Ids of every batch that was begun, in order."""
    lines = [line.split() for line in notes.read_text().splitlines()]
    return [tuple(ids) for kind, _, *ids in lines if kind == "begin"]


def actors(notes):
    """Process ids of the actors that are alive."""
    lines = [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []
    return [pid for pid in {int(pid) for kind, pid, *_ in lines if kind == "open"} if _is_alive(pid)]


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
