"""The disk tier: one immutable file per entry, a rebuildable index, least recently used leave first."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from threading import RLock

from ragcachekit.errors import StoreError
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted, Found, LayerSource, StoreStats, concerns
from ragcachekit.store.counters import Counters
from ragcachekit.store.entry_file import EntryImage, read_entry, read_key
from ragcachekit.store.entry_header import EntryDamaged
from ragcachekit.store.folder import exclusive, open_folder, sweep_orphans, sync_folder, temp_file
from ragcachekit.store.index import EntryIndex, IndexFailed, discard_index
from ragcachekit.types import KVKey

_ENTRY_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")


class DiskStore:
    """Chunk KV in files that survive the process; several processes may share the folder.

    The files are the truth: a read opens the file and verifies all of it, whatever the index says. The
    index only knows sizes and the order of use. A write goes to a temporary file, reaches the medium,
    and gets its name in the same transaction that adds it to the index, so that being killed at any
    moment leaves nothing but whole entries and a temporary file that the next start sweeps.

    Parameters
    ----------
    path : Path
        The folder, created with mode 0700 (POSIX only).
    budget : int
        Bytes that all entry files may take together; > 0. The index (some hundred bytes per entry) and
        the one entry being written come on top.

    Raises
    ------
    StoreError
        If the folder cannot be used; the message says what to do.
    """

    def __init__(self, path: Path, budget: int) -> None:
        if budget <= 0:
            raise ValueError(
                f"the disk tier's budget must be > 0 bytes, got {budget}; leave the tier out instead"
            )
        self._folder = Path(path)
        self._budget = budget
        self._counters = Counters("disk")
        self._closed = False
        self._writing = RLock()
        open_folder(self._folder)
        try:
            with exclusive(self._folder / "lock"):
                sweep_orphans(self._folder)
                self._index = self._open_index()
        except OSError as error:
            raise StoreError(f"cannot open the cache folder {self._folder}: {error}") from error

    def get(self, key: KVKey, worth: float = 1.0) -> Found | None:
        """The verified entry under ``key``, now the most recently used one, or None."""
        kv = None if self._closed else self._read(key)
        if kv is None:
            self._counters.count("misses")
            return None
        self._counters.count("hits")
        return Found(kv, "disk")

    def open(self, key: KVKey, worth: float = 1.0) -> Found | LayerSource | None:
        """As :meth:`get`."""
        return self.get(key, worth)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Write ``kv`` to its file, evicting least recently used entries first.

        False, with all other entries whole, if it exceeds the whole budget or the medium refuses it.
        An entry that is already there under this key is replaced at once and as a whole.

        Raises
        ------
        TypeError
            For KV of a dtype that safetensors does not know.
        """
        image = EntryImage(key, kv)
        with self._writing:
            if self._closed:
                return False
            try:
                if image.nbytes <= self._budget:
                    self._write(key.digest(), image)
                    return True
                self._counters.warn_once(
                    "large", "entry of %d bytes exceeds the budget %d", image.nbytes, self._budget
                )
            except (OSError, IndexFailed) as error:
                self._counters.warn_once("write", "cannot write to %s: %s", self._folder, error)
        self._counters.count("failed_writes")
        return False

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`; nobody is handed down."""
        return self.put(key, kv), ()

    def __contains__(self, key: KVKey) -> bool:
        return not self._closed and os.path.exists(self._file(key.digest()))

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """As :meth:`forget`, returning the digests of the dropped keys."""
        if self._closed:
            return frozenset()
        with self._writing:
            # The files' sealed headers decide, not the index: a forgotten tenant must be gone.
            try:
                files = self._files()
            except OSError as error:
                self._counters.warn_once(
                    "forget", "cannot list %s, nothing forgotten: %s", self._folder, error
                )
                return frozenset()
            return frozenset(digest for digest in files if self._drop_if(digest, namespace, chunk_ids))

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Delete the files of the namespace that hold, or were encoded behind, one of ``chunk_ids``.

        Files too damaged to say whose they are go as well.
        """
        return len(self.drop(namespace, chunk_ids))

    def stats(self) -> tuple[StoreStats, ...]:
        """One record; sizes are those of the files."""
        entries, nbytes = 0, 0
        if not self._closed:
            try:
                with self._index.session():
                    entries, nbytes = len(self._index), self._index.nbytes
            except IndexFailed:
                with suppress(OSError):
                    sizes = self._files().values()
                    entries, nbytes = len(sizes), sum(sizes)
        return (self._counters.stats(entries=entries, nbytes=nbytes, budget=self._budget),)

    def close(self) -> None:
        """Close the index; further calls are misses."""
        with self._writing:
            self._closed = True
            self._index.close()

    def _file(self, digest: str) -> Path:
        return self._folder / f"{digest}.safetensors"

    def _files(self) -> dict[str, int]:
        """Digest → size of every entry file, least recently written first."""
        found = []
        for path in self._folder.iterdir():
            match = _ENTRY_NAME.fullmatch(path.name)
            if match:
                with suppress(FileNotFoundError):  # another process evicted it just now
                    status = path.lstat()
                    found.append((status.st_mtime_ns, match[1], status.st_size))
        return {digest: size for _, digest, size in sorted(found)}

    def _read(self, key: KVKey) -> ChunkKV | None:
        digest = key.digest()
        try:
            kv = read_entry(self._file(digest), key)
        except FileNotFoundError:
            self._forget_missing(digest)
        except EntryDamaged as error:
            self._counters.warn_once("damaged", "dropped a damaged entry: %s", error)
            self._counters.count("damaged")
            self._remove(digest)
        except OSError as error:
            self._counters.warn_once("read", "cannot read from %s: %s", self._folder, error)
        else:
            with suppress(IndexFailed), self._index.session():  # the order of use may be lost, the hit not
                self._index.touch(digest)
            return kv
        return None

    def _write(self, digest: str, image: EntryImage) -> None:
        with self._index.session():
            self._make_room(digest, image.nbytes)
        with temp_file(self._folder) as (fd, temp):
            image.write(fd)
            self._publish(temp, digest, image.nbytes)

    def _publish(self, temp: Path, digest: str, nbytes: int) -> None:
        renamed = False
        try:
            with self._index.session():
                os.replace(temp, self._file(digest))
                renamed = True
                self._index.add(digest, nbytes)
                self._make_room(digest, nbytes)  # other processes may have filled it meanwhile
            sync_folder(self._folder)
        except BaseException:
            if renamed:  # a file that the index does not know would escape the budget
                self._remove(digest)
            raise

    def _make_room(self, digest: str, nbytes: int) -> None:
        """Evict until ``nbytes`` under ``digest``, in place of what it has now, fit in the budget."""
        self._index.touch(digest)  # now last in line: what it has now is not evicted for itself
        while self._index.nbytes - (self._index.size(digest) or 0) + nbytes > self._budget:
            victim = self._index.oldest()
            self._file(victim).unlink(missing_ok=True)
            self._index.remove(victim)
            self._counters.count("evictions")

    def _remove(self, digest: str) -> bool:
        """Delete an entry, even if the index cannot follow; False if the file is still there."""
        try:
            with suppress(IndexFailed), self._index.session():
                self._index.remove(digest)
                self._file(digest).unlink(missing_ok=True)
                return True
            self._file(digest).unlink(missing_ok=True)
        except OSError as error:
            self._counters.warn_once("remove", "cannot delete from %s: %s", self._folder, error)
            return False
        return True

    def _forget_missing(self, digest: str) -> None:
        """Drop the row of a file that somebody deleted, unless it has come back by now."""
        with suppress(IndexFailed), self._index.session():
            if not os.path.exists(self._file(digest)):
                self._index.remove(digest)

    def _drop_if(self, digest: str, namespace: str, chunk_ids: frozenset[str] | None) -> bool:
        try:
            if not concerns(read_key(self._file(digest)), namespace, chunk_ids):
                return False
        except EntryDamaged:
            self._counters.count("damaged")
        except FileNotFoundError:  # another process evicted it just now
            return False
        except OSError as error:
            self._counters.warn_once("forget", "cannot tell whose %s is: %s", self._file(digest), error)
            return False
        return self._remove(digest)

    def _open_index(self) -> EntryIndex:
        folder = self._folder / "index"
        try:
            return self._reconciled(folder)
        except IndexFailed as error:
            self._counters.warn_once("index", "index rebuilt from the files: %s", error)
        discard_index(folder)
        return self._reconciled(folder)

    def _reconciled(self, folder: Path) -> EntryIndex:
        """The index in ``folder``, brought to agree with the files."""
        index = self._index = EntryIndex(folder)
        with index.session():
            files = self._files()
            for digest in index.digests():
                if index.size(digest) != files.get(digest):
                    index.remove(digest)
            known = set(index.digests())
            kept = [digest for digest in files if digest in known or self._adopt(digest, files[digest])]
            if index.nbytes != sum(files[digest] for digest in kept):
                raise IndexFailed("its sum of sizes is wrong")
            self._make_room("", 0)  # the budget may be smaller than last time
        return index

    def _adopt(self, digest: str, nbytes: int) -> bool:
        """Take a file into the index, or delete it if nobody could ever read it."""
        try:
            read_key(self._file(digest))
        except EntryDamaged as error:
            self._counters.warn_once("damaged", "dropped a damaged entry: %s", error)
            self._counters.count("damaged")
            self._file(digest).unlink(missing_ok=True)
            return False
        self._index.add(digest, nbytes)
        return True
