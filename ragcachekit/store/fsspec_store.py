"""The bulk tier: one object per entry on any fsspec file system."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ragcachekit.errors import StoreError
from ragcachekit.store.books import Books
from ragcachekit.store.guard import Guard
from ragcachekit.store.remote_store import PATIENCE, RemoteStore
from ragcachekit.store.seal import Seal


class FsspecStore(RemoteStore):
    """Chunk KV as objects in a folder of a local, network or object store.

    With ``books_url``, all processes that give the same server have one account of the folder: none of
    them writes without having reserved its bytes there, so together they stay within the budget, and what
    one reads is recently used for all. While that server does not answer, entries are read and none are
    written. Without it the budget is this process's own account: it lists the folder when it is opened and
    counts what it writes and reads from then on. Several such writers on one folder can together pass the
    budget; give each its share, or its own folder.

    Parameters
    ----------
    url : str
        ``s3://bucket/kv``, ``file:///mnt/kv``, ``memory://kv`` or any other that fsspec knows.
    budget : int
        Bytes of sealed entries; > 0.
    key : bytes, str or None
        What entries are signed with: bytes, or the name of an environment variable.
    deadline : float
        Seconds per operation; a large entry takes its time to come, and to be verified.
    quotas : mapping of str to int
        Bytes that single namespaces may take; ``*`` stands for every other one.
    books_url : str or None
        The Redis or Valkey server that keeps the account, as in
        :class:`~ragcachekit.store.redis_store.RedisStore`.
    books_deadline : float
        Seconds per operation on that server.
    lease : float or None
        Seconds after which a writer that has not finished counts as dead, and what it began to write is
        deleted; None for ten deadlines, 30 at least.
    prefix : str
        What all keys on that server begin with.
    options : mapping
        For the file system (``endpoint_url`` of S3 and the like).
    failures, cooldown, clock
        After how many failures in a row (or twice as many among the last four times as many) it is left
        alone, and for how many seconds.

    Raises
    ------
    ValueError
        For a budget, url or key that cannot be used.
    StoreError
        If fsspec, what it needs for this url, or redis-py for the books, is not installed.
    """

    def __init__(
        self,
        url: str,
        budget: int,
        *,
        key: bytes | str | None,
        deadline: float = 2.0,
        quotas: Mapping[str, int] | None = None,
        books_url: str | None = None,
        books_deadline: float = 0.2,
        lease: float | None = None,
        prefix: str = "ragcachekit",
        options: Mapping[str, Any] | None = None,
        failures: int = 3,
        cooldown: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if budget <= 0:
            raise ValueError(
                f"the bulk tier's budget must be > 0 bytes, got {budget}; leave the tier out instead"
            )
        seal = Seal(key)
        try:
            from fsspec.core import url_to_fs

            from ragcachekit.store.booked_backend import BookedBackend
            from ragcachekit.store.fsspec_backend import FsspecBackend

            fs, root = url_to_fs(url, **dict(options or {}))
        except ImportError as error:
            raise StoreError(
                f"the bulk tier needs fsspec and what it names for this url ({error}): "
                "pip install 'ragcachekit[fsspec]' (with s3:// 'ragcachekit[s3]'), or use bulk_url=None"
            ) from error
        guard = Guard("bulk", deadline, failures=failures, cooldown=cooldown, clock=clock)
        backend: FsspecBackend | BookedBackend
        if books_url is None:
            backend = FsspecBackend(fs, root, budget, dict(quotas or {}), deadline)
        else:
            # An operation of this tier has time to hear that the server says nothing.
            patience = min(books_deadline, deadline / 4)
            lease = max(30.0, PATIENCE * deadline) if lease is None else lease
            limits: dict[str, Any] = {"failures": failures, "cooldown": cooldown, "clock": clock}
            books = partial(Books, books_url, patience, lease, prefix=prefix, **limits)
            backend = BookedBackend(fs, root, budget, dict(quotas or {}), books)
        super().__init__("bulk", backend, seal, guard, budget, quotas=quotas)
        guard.run(backend.open, 0, PATIENCE * deadline)
