"""The bulk tier: one object per entry on any fsspec file system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragcachekit.errors import StoreError
from ragcachekit.store.remote.deadlines import DeadlineExecutor
from ragcachekit.store.remote.remote_store import FORGET_DEADLINES, RemoteStore
from ragcachekit.store.remote.seal import Seal


class FsspecStore(RemoteStore):
    """Chunk KV as objects in a folder of a local, network or object store.

    The budget is this process's own: the folder is listed when it is opened, and writes and reads count from
    then on. Several writers of one folder can together exceed it; give each its own folder or share.

    Parameters
    ----------
    url : str
        ``s3://bucket/kv``, ``file:///mnt/kv``, ``memory://kv`` or any other fsspec url.
    budget, quotas
        As in :class:`RemoteStore`.
    key : bytes, str or None
        Signs entries: bytes, or the name of an environment variable.
    deadline : float
        Seconds per operation, enough to read and verify a large entry.
    options : mapping
        For the file system (``endpoint_url`` of S3 and the like).

    Raises ValueError for a bad budget, url or key, and StoreError if fsspec, or what it needs for this url,
    is not installed.
    """

    def __init__(
        self,
        url: str,
        budget: int,
        *,
        key: bytes | str | None,
        deadline: float = 2.0,
        quotas: Mapping[str, int] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if budget <= 0:
            raise ValueError(
                f"the bulk tier's budget must be > 0 bytes, got {budget}; leave the tier out instead"
            )
        seal = Seal(key)
        try:
            from fsspec.core import url_to_fs

            from ragcachekit.store.remote.fsspec_backend import FsspecBackend

            fs, root = url_to_fs(url, **dict(options or {}))
        except ImportError as error:
            raise StoreError(
                f"the bulk tier needs fsspec and what it names for this url ({error}): "
                "pip install 'ragcachekit[fsspec]' (with s3:// 'ragcachekit[s3]'), or use bulk_url=None"
            ) from error
        executor = DeadlineExecutor("bulk", deadline)
        backend = FsspecBackend(fs, root, budget, dict(quotas or {}), deadline)
        super().__init__("bulk", backend, seal, executor, budget, quotas=quotas)
        executor.run(backend.open, 0, FORGET_DEADLINES * deadline)
