"""The bulk tier of processes that keep common books on a Redis server."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock

from fsspec.spec import AbstractFileSystem

from ragcachekit.store.base import quota_of
from ragcachekit.store.books import Books
from ragcachekit.store.fsspec_objects import Objects, name_of
from ragcachekit.store.process import PerProcess
from ragcachekit.store.remote_base import Left, NotHeard, Saved, Usage, Writes, hashed
from ragcachekit.types import KVKey

_TRIES = 32  # times that a write asks for room: others may have been quicker
_CENSUS_SECONDS = 3600  # a process that opens the folder this long after the last census makes another
_AT_ONCE = 500


class BookedBackend:
    """Objects on a file system; sizes, order of use and reservations on a server.

    The objects are the truth: a read asks for the object and waits for no server. A write reserves its
    bytes, deletes whom the books name, writes, and has the object counted; without the server nothing is
    written, so that the budget holds whatever fails. A writer that dies in between loses its reservation
    after a while, and its object with it. ``forget`` first makes the books refuse what is being written,
    and is not done before those writes have ended. What was written, refused and could not be deleted is
    not read here, and every operation tries to delete it.

    Parameters
    ----------
    fs : fsspec.AbstractFileSystem
    root : str
        A folder of it, without protocol.
    budget : int
    quotas : mapping of str to int
    books : callable
        Makes the books, given ``exists=``, which tells whether there is an object of some name.
    """

    def __init__(
        self,
        fs: AbstractFileSystem,
        root: str,
        budget: int,
        quotas: Mapping[str, int],
        books: Callable[..., Books],
    ) -> None:
        self._objects, self._books = Objects(fs, root), books(exists=self._is_there)
        self._budget, self._quotas = budget, quotas
        self._doomed: dict[str, str] = {}  # name → token of the write, the one last tried at the end
        self._locks = PerProcess(Lock)
        self._folder = hashlib.sha256(f"{fs.protocol}:{root}".encode()).hexdigest()[:32]

    @property
    def hears(self) -> bool:
        return self._books.answers

    def load(self, key: KVKey) -> bytes | None:
        name = name_of(key)
        if self._hidden(name):
            return None
        try:
            blob = self._objects.read(name)
        except FileNotFoundError:
            self._books.doubt(name)
            return None
        self._books.used(name)
        return blob

    def save(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> Saved:
        name, token = name_of(key), secrets.token_hex(8)
        if self._hidden(name):
            return Saved(False)
        limits = (self._budget, quota_of(self._quotas, key.namespace) or 0)
        place, evicted = self._room(name, len(blob), limits, token)
        if place is None:
            return Saved(False, evicted)
        if not wanted():
            self._books.release(name, token, whole=True)
            return Saved(False, evicted)
        try:
            self._objects.write(key, blob)
        except BaseException:
            # Where objects are renamed into place, the former one is as it was; else nobody knows.
            self._give_up(name, token, whole=place == "again" and self._objects.renames)
            raise
        if self._books.commit(name, token):
            return Saved(True, evicted)
        self._give_up(name, token, whole=False)  # forgotten meanwhile, too late, or nobody can tell
        return Saved(False, evicted)

    def delete(self, key: KVKey) -> None:
        self._remove([name_of(key)])

    def exists(self, key: KVKey) -> bool:
        return not self._hidden(name_of(key)) and self._objects.exists(name_of(key))

    def forget(
        self,
        namespace: str,
        chunk_ids: frozenset[str] | None,
        dropped: set[str],
        awaits: Writes = frozenset(),
    ) -> None:
        group = hashed(namespace)
        earlier = [f"{group}/{digest}" for digest in dropped]
        writes: Writes | None = frozenset()
        if awaits:
            self._await(group, awaits)
        else:
            writes = self._books.forgotten(group) if self._known() else None
        self._sweep(list(self._objects.concerned(namespace, chunk_ids)), dropped)
        if writes is None or writes:
            raise NotHeard(writes or frozenset())
        for name in earlier:  # deleted while the books could not be told
            self._books.doubt(name)

    def usage(self) -> Usage:
        answer = self._books.usage() if self._known() else None
        if answer is not None and not answer[1]:
            self._census()
            answer = self._books.usage()
        return Usage(0, 0) if answer is None else answer[0]

    def open(self) -> int:
        """See what is there if that was not done lately, and drop what exceeds the budget."""
        if not self._known():
            return 0
        age = self._books.age()
        if age is None or ((age < 0 or age >= _CENSUS_SECONDS) and not self._census()):
            return 0
        return self._room("", 0, (self._budget, 0), secrets.token_hex(8))[1]

    def close(self) -> None:
        self._books.close()

    def _known(self) -> bool:
        """Find out whose books these are, from the folder itself: two machines may mount it differently,
        and the same path may be another folder on each."""
        if not self._books.mark:
            mark = self._objects.mark()
            if mark is None and self._books.claim(self._folder):
                mark = self._objects.mark() or self._objects.make_mark()
            self._books.name(mark or "")
        return bool(self._books.mark)

    def _census(self) -> bool:
        return self._books.census(self._objects.listing)

    def _room(self, name: str, nbytes: int, limits: tuple[int, int], token: str) -> tuple[str | None, int]:
        """Reserve; whether in place of nothing or of a former object, None if not, and whom it took."""
        deleted: Sequence[str] = ()
        evicted = 0
        for _ in range(_TRIES if self._known() else 0):
            answer = self._books.reserve(name, nbytes, limits, token, deleted)
            deleted = ()
            if answer is None:
                break
            if answer.word == "evict":
                deleted = self._evict(answer.names, token)
                evicted += len(deleted)
            elif answer.word == "census":
                if not self._census():
                    break
            else:
                return (answer.names[0] if answer.names else None), evicted
        return None, evicted

    def _evict(self, victims: Sequence[str], token: str) -> Sequence[str]:
        """Delete them; those that cannot be deleted stay, and others are asked for next time."""
        kept: dict[str, Exception] = {}
        for victim in victims:
            try:
                self._objects.remove(victim)
            except Exception as error:
                kept[victim] = error
        if kept:
            self._books.stay(token, list(kept))
        if len(kept) == len(victims):
            raise kept[victims[0]]
        return [victim for victim in victims if victim not in kept]

    def _give_up(self, name: str, token: str, *, whole: bool) -> None:
        """End a write that does not count. If its object cannot be deleted, the reservation goes on."""
        if not whole:
            try:
                self._objects.remove(name)
            except BaseException:
                with self._locks.get():
                    self._doomed[name] = token
                raise
        self._books.release(name, token, whole=whole)

    def _hidden(self, name: str) -> bool:
        """Whether what lies under ``name`` was refused; before that, try again to delete such objects."""
        if not self._doomed:
            return False
        with self._locks.get():
            oldest = next(iter(self._doomed), name)
            tried = {other: self._doomed.pop(other) for other in {name, oldest} if other in self._doomed}
            self._doomed |= tried  # at the end
        for other, token in tried.items():
            with suppress(Exception):
                self._bury(other, token)
        return name in self._doomed

    def _bury(self, name: str, token: str) -> None:
        writer = self._books.writer(name)
        if writer is None or writer == token:  # else its lease had ended, and another process deleted it
            self._objects.remove(name)
            self._books.release(name, token, whole=False)
        with self._locks.get():
            self._doomed.pop(name, None)

    def _await(self, group: str, awaits: Writes) -> None:
        """NotHeard until these writes have ended; what they have written meanwhile goes."""
        writes = self._books.writes(group) if self._known() else None
        left = awaits if writes is None else awaits & writes
        if left:
            for _, name in left:
                with suppress(Exception):
                    self._objects.remove(name)
            raise NotHeard(left)

    def _sweep(self, names: Sequence[str], dropped: set[str]) -> None:
        left: Left | None = None
        for at in range(0, len(names), _AT_ONCE):
            try:
                self._remove(names[at : at + _AT_ONCE], dropped)
            except Left as some:
                left = some
        if left is not None:
            raise left

    def _remove(self, names: Sequence[str], dropped: set[str] | None = None) -> None:
        """Delete objects, and have the books know; what is written under their names later is not meant."""
        stamps = self._books.stamps(names) if self._known() else {}
        gone: dict[str, str] = {}

        def removed(name: str) -> None:
            if name in stamps:
                gone[name] = stamps[name]
            if dropped is not None:
                dropped.add(name.partition("/")[2])

        try:
            self._objects.remove_all(names, removed)
        finally:
            self._books.gone(gone)

    def _is_there(self, name: str) -> bool:
        """Asked about objects that the books know and a read did not find: perhaps all the folder went."""
        if self._objects.exists(name):
            return True
        mark = self._objects.mark()
        if mark != self._books.mark:
            self._books.name(mark or "")
        return False
