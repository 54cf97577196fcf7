"""The books of a bulk folder, on a Redis server: one account for all processes that write there."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock
from typing import Any, NamedTuple

from ragcachekit.errors import StoreError
from ragcachekit.store import books_scripts as scripts
from ragcachekit.store.guard import Guard
from ragcachekit.store.process import PerProcess
from ragcachekit.store.redis_store import connect
from ragcachekit.store.remote_base import Usage, Writes

_AT_ONCE = 500  # names per script: other clients wait that long
_REMEMBERED = 10_000  # uses that are held back while the server does not answer
_CENSUS = 10  # leases that a census may take
_CLAIM = 10_000  # milliseconds for marking a new folder


class Answer(NamedTuple):
    """What the books say to a wish for room: see :data:`~ragcachekit.store.books_scripts.RESERVE`."""

    word: str
    names: tuple[str, ...] = ()


class Books:
    """Sizes, order of use, reservations and forgets of one folder's objects.

    Every method answers within the deadline: with None, False or nothing if the server does not. Uses are
    told behind the caller's back, so that reading waits for nothing.

    Parameters
    ----------
    url : str
        As in :class:`~ragcachekit.store.redis_store.RedisStore`.
    deadline : float
        Seconds per operation.
    lease : float
        Seconds that a writer has from its reservation on; after that it counts as dead.
    exists : callable
        Whether there is an object of that name: asked where a read found none that the books know.
    prefix : str
        What all keys on the server begin with.
    failures, cooldown, clock
        After how many failures in a row (or twice as many among the last four times as many) the server is
        left alone, and for how many seconds.
    """

    def __init__(
        self,
        url: str,
        deadline: float,
        lease: float,
        *,
        exists: Callable[[str], bool],
        prefix: str = "ragcachekit",
        failures: int = 3,
        cooldown: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = connect(url, deadline)
        self._guard = Guard("books", deadline, failures=failures, cooldown=cooldown, clock=clock)
        self._lease = max(1, int(lease * 1000))
        self._prefix, self._exists = prefix, exists
        self.mark = ""
        """What the folder is known by; empty while it is not known."""
        self._locks = PerProcess(Lock)
        self._used: dict[str, None] = {}
        self._doubted: dict[str, None] = {}
        self._teller = 0  # process that has a telling under way

    @property
    def answers(self) -> bool:
        """Whether it is worth asking: False while the server is left alone."""
        return self._guard.ready

    def name(self, mark: str) -> None:
        """These are the books of the folder with this mark; empty: of none that is known."""
        self.mark = mark

    def claim(self, folder: str) -> bool:
        """Whether this process may mark the folder, which nobody has; for ten seconds no other may."""
        name = f"{self._prefix}-bulk-new:{folder}"
        return bool(self._run(lambda: self._client.set(name, b"1", nx=True, px=_CLAIM)))

    def reserve(
        self, name: str, nbytes: int, limits: tuple[int, int], token: str, deleted: Sequence[str] = ()
    ) -> Answer | None:
        """Ask for room within ``limits`` (budget, quota or 0), telling which objects were deleted for it."""

        def ask() -> Any:
            self._tell_latest()  # or what was read just now would be among the victims
            return self._eval(scripts.RESERVE, name, nbytes, *limits, token, self._lease, *deleted)

        reply = self._run(ask)
        return None if reply is None else Answer(reply[0].decode(), _texts(reply[1:]))

    def commit(self, name: str, token: str) -> bool:
        """Whether the object that was written now counts; else delete it and :meth:`release` the name."""
        return bool(self._run(lambda: self._eval(scripts.COMMIT, name, token)))

    def release(self, name: str, token: str, *, whole: bool) -> None:
        """Give a reservation back; ``whole`` if the object from before it is still there."""
        self._run(lambda: self._eval(scripts.RELEASE, name, token, int(whole)))

    def stay(self, token: str, names: Sequence[str]) -> None:
        """Objects that could not be deleted stay, the last that will be asked to leave."""
        self._run(lambda: self._eval(scripts.STAY, token, *names))

    def stamps(self, names: Sequence[str]) -> dict[str, str]:
        """Name → when it was written, in the books' own count, of those that the books know."""
        return self._run(lambda: self._stamps(names)) or {}

    def gone(self, stamps: dict[str, str]) -> None:
        """The objects that were written at these stamps are no more."""
        for pairs in _pieces(_flat(stamps.items()), 2 * _AT_ONCE):
            self._run(lambda pairs=pairs: self._eval(scripts.GONE, *pairs))  # type: ignore[misc]

    def forgotten(self, group: str) -> Writes | None:
        """From now on no write of this namespace that was reserved before counts; None if not heard.

        Returns those writes: an object of theirs may still come, until they have given up.
        """
        return self._writes(group, secrets.token_hex(8))

    def writes(self, group: str) -> Writes | None:
        """The writes of this namespace that are under way and within their lease; None if not heard."""
        return self._writes(group, "")

    def writer(self, name: str) -> str | None:
        """Token of the write that has reserved this name, empty if none has; None if not heard."""
        reply = self._run(lambda: self._client.hget(self._key("writes"), name) or b"- ")
        return None if reply is None else reply.split(b" ")[1].decode()

    def used(self, name: str) -> None:
        """An object was read. The server hears of it later."""
        self._note(name, found=True)

    def doubt(self, name: str) -> None:
        """An object was asked for and not found; if the books know it, they are put right later."""
        self._note(name, found=False)

    def usage(self) -> tuple[Usage, bool] | None:
        """Entries and bytes, and whether a census stands behind them."""
        reply = self._run(lambda: self._eval(scripts.USAGE))
        return None if reply is None else (Usage(reply[0], reply[1]), bool(reply[2]))

    def age(self) -> int | None:
        """Seconds since the last census; -1 if the server has lost it."""
        age = self._run(lambda: self._eval(scripts.AGE))
        return None if age is None else int(age)

    def census(self, listing: Callable[[], dict[str, int]]) -> bool:
        """Take in what there is; False if another process does just now, or the server does not answer."""
        token = secrets.token_hex(8)
        begun = self._run(lambda: self._eval(scripts.BEGIN, token, _CENSUS * self._lease))
        if not begun:
            return False
        found = listing()
        for pairs in _pieces(_flat(found.items()), 2 * _AT_ONCE):
            fold = (scripts.FOLD, token, _CENSUS * self._lease, *pairs)
            if self._run(lambda fold=fold: self._eval(*fold)) != 1:  # type: ignore[misc]
                return False
        # The whole account comes over the line: nobody's answer waits for that.
        patience = _CENSUS * self._guard.deadline
        nothing: dict[str, str] = {}
        unlisted = self._guard.run(lambda: self._unlisted(found, begun), nothing, patience)
        self.gone(unlisted)
        return bool(self._run(lambda: self._eval(scripts.END, token)))

    def close(self) -> None:
        """Let go of connections; does not wait."""
        self._guard.close()
        self._client.close()

    def _run(self, operation: Callable[[], Any]) -> Any:
        return self._guard.run(operation, None)

    def _eval(self, script: str, *arguments: Any) -> Any:
        # The text each time, not its hash: some kilobytes more, and a restarted server knows it.
        return self._client.eval(script, 1, self._key(), *arguments)

    def _key(self, *fields: str) -> str:
        if not self.mark:
            raise StoreError("nobody knows whose books these are")
        return ":".join((f"{{{self._prefix}-bulk-{self.mark}}}", *fields))

    def _writes(self, group: str, gen: str) -> Writes | None:
        reply = self._run(lambda: self._eval(scripts.WRITES, group, gen))
        return None if reply is None else frozenset(zip(*[iter(_texts(reply))] * 2, strict=True))

    def _stamps(self, names: Sequence[str]) -> dict[str, str]:
        stamps: dict[str, str] = {}
        for some in _pieces(names, _AT_ONCE):
            known = self._client.hmget(self._key("info"), some)
            stamps |= {name: _stamp(text) for name, text in zip(some, known, strict=True) if text}
        return stamps

    def _unlisted(self, found: dict[str, int], begun: int) -> dict[str, str]:
        """What the books knew before the listing began, and it does not show."""
        known = self._client.hscan_iter(self._key("info"), count=_AT_ONCE)
        stamps = {name.decode(): _stamp(text) for name, text in known}
        return {name: s for name, s in stamps.items() if name not in found and int(s) <= begun}

    def _note(self, name: str, *, found: bool) -> None:
        with self._locks.get():
            notes = self._used if found else self._doubted
            notes.pop(name, None)
            notes[name] = None
            if len(notes) > _REMEMBERED:
                del notes[next(iter(notes))]
            if self._teller == os.getpid() or not self.mark:  # a fork takes the teller away
                return
            self._teller = os.getpid()
        if not self._guard.post(self._tell):
            self._teller = 0

    def _tell(self) -> None:
        try:
            while self._notes():
                self._tell_used()
                with self._locks.get():
                    doubted, self._doubted = list(self._doubted), {}
                known = self._stamps(doubted)
                gone = {name: stamp for name, stamp in known.items() if not self._exists(name)}
                for pairs in _pieces(_flat(gone.items()), 2 * _AT_ONCE):
                    self._eval(scripts.GONE, *pairs)
        except BaseException:
            self._teller = 0
            raise

    def _notes(self) -> bool:
        """Whether there is more to tell; if not, the next note needs another telling."""
        with self._locks.get():
            if not (self._used or self._doubted):
                self._teller = 0
                return False
            return True

    def _tell_latest(self) -> None:
        """No more than one script: an operation waits. If there is more, all is told behind its back, in
        order, so that these are the last once more."""
        with self._locks.get():
            used = list(self._used)
            if len(used) <= _AT_ONCE:
                self._used = {}
        if used:
            self._eval(scripts.TOUCH, *used[-_AT_ONCE:])

    def _tell_used(self) -> None:
        with self._locks.get():
            used, self._used = list(self._used), {}
        for names in _pieces(used, _AT_ONCE):
            self._eval(scripts.TOUCH, *names)


def _flat(pairs: Iterable[tuple[object, object]]) -> list[object]:
    return [word for pair in pairs for word in pair]


def _pieces(words: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (words[at : at + size] for at in range(0, len(words), size))


def _texts(words: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(word.decode() for word in words)


def _stamp(info: bytes) -> str:
    return info.split()[1].decode()
