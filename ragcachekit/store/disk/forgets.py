"""Forgetting in the disk tier, also where the medium fails just then."""

from __future__ import annotations

from collections.abc import Iterable

from ragcachekit.errors import StoreError
from ragcachekit.store.base import concerns
from ragcachekit.store.counters import Counters
from ragcachekit.store.disk.entry_files import SECONDS_TO_OPEN, EntryFiles
from ragcachekit.store.disk.folder import FolderBusy, IndexFailed
from ragcachekit.store.entry.file import read_key
from ragcachekit.store.entry.header import EntryDamaged
from ragcachekit.types import KVKey

_Which = tuple[str, frozenset[str] | None]
"""Namespace and chunk ids of a forget."""


class DiskForgets:
    """Deletes what is to be forgotten, and remembers what ought to be gone and is not.

    Such an entry could not be deleted (Windows deletes no open file), or its header could not be read and
    the index did not say whose it is. This process neither hands it out nor replaces it. It tries again to
    delete it with the next put or forget, when it is asked for, and at the end.
    """

    def __init__(self, tier_files: EntryFiles, counters: Counters) -> None:
        self._files, self._counters = tier_files, counters
        # Digest → forgets that it may be about. Single steps on it are atomic: it needs no lock.
        self._left: dict[str, set[_Which]] = {}

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None) -> frozenset[str]:
        """Digests of what went; raises as :meth:`ragcachekit.store.disk.disk_store.DiskStore.forget`."""
        if not self._files.exists():
            return frozenset()
        late, which = self._late_writer(), (namespace, chunk_ids)
        try:
            files: Iterable[str] = self._files.files()
        except OSError as error:
            self._dropped(which, [d for d, owner in self._files.owners().items() if owner == namespace])
            raise StoreError(
                f"cannot list the cache folder, so entries may be left; forget again: {error}"
            ) from error
        dropped = self._dropped(which, files)
        self.retry()
        if late is not None:
            raise StoreError(
                "another process or thread keeps the cache folder busy and may write what was forgotten; "
                f"forget again when it goes on or has ended: {late}"
            ) from late
        return dropped

    def hide(self, key: KVKey, digest: str) -> None:
        """Remember an entry that ought to be gone, and could not be deleted."""
        self._left.setdefault(digest, set()).add((key.namespace, frozenset({key.chunk_id})))

    def hides(self, key: KVKey, digest: str) -> bool:
        """Whether it ought to be gone and cannot be deleted now either."""
        which = self._left.get(digest)
        if which is None:
            return False
        if any(concerns(key, *forget) for forget in tuple(which)) and not self._files.remove(digest):
            return True
        self._left.pop(digest, None)
        return False

    def retry(self) -> None:
        """Try again to delete what is left."""
        for digest in tuple(self._left):
            try:
                self.hides(read_key(self._files.path(digest)), digest)
            except (EntryDamaged, FileNotFoundError):
                if self._files.remove(digest):
                    self._left.pop(digest, None)
            except OSError:
                continue

    def _late_writer(self) -> FolderBusy | None:
        """Wait for a put under way; the error if that takes too long."""
        try:
            self._files.wait_for_writers(SECONDS_TO_OPEN)
        except FolderBusy as error:
            return error
        except IndexFailed as error:  # nobody can lock the folder, and so write to it
            self._counters.warn_once("lock", "cannot wait for other writers: %s", error)
        return None

    def _dropped(self, which: _Which, digests: Iterable[str]) -> frozenset[str]:
        left: list[str] = []
        dropped = frozenset(digest for digest in digests if self._drops(which, digest, left))
        for digest in left:
            self._left.setdefault(digest, set()).add(which)
        if left:
            self._counters.warn_once(
                "forget", "%d entries could not be forgotten; this process serves them no more", len(left)
            )
        if dropped:
            self._files.sync()
        return dropped

    def _drops(self, which: _Which, digest: str, left: list[str]) -> bool:
        """Whether an entry has gone, by its sealed header; one that should have is added to ``left``."""
        try:
            if not concerns(read_key(self._files.path(digest)), *which):
                return False
        except EntryDamaged:
            self._counters.count("damaged")
        except FileNotFoundError:  # another process evicted it just now
            return False
        except OSError:
            owner = self._files.owners().get(digest)
            if owner is None:
                left.append(digest)
            if owner != which[0]:
                return False
        gone = self._files.remove(digest)
        if not gone:
            left.append(digest)
        return gone
