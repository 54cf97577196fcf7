"""HMAC-SHA256 over an entry and its name, for services that others can write to. Nothing is encrypted."""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence

import numpy as np

from ragcachekit.store.entry import EntryDamaged

_MAGIC = b"rck-seal"
_DIGEST = "sha256"
_ID_BYTES, _MAC_BYTES = 8, 32
OVERHEAD = len(_MAGIC) + _ID_BYTES + _MAC_BYTES
"""Bytes that a seal adds to an entry."""
_SHORTEST = 16

_HOW = (
    "make one with `openssl rand -hex 32`, give every process of the deployment the same one in an "
    "environment variable, and name that variable in remote_key="
)


class OtherKey(EntryDamaged):
    """The entry was sealed with the key of another deployment, or an earlier key of this one."""


class Seal:
    """Signs and verifies entries.

    Parameters
    ----------
    key : bytes, str or None
        The key, or the name of the environment variable that has it; at least 16 bytes.

    Raises ValueError if there is no key or it is too short. The message does not repeat ``key``, which might
    be the key itself, given in place of a name.
    """

    def __init__(self, key: bytes | str | None) -> None:
        if key is None:
            raise ValueError(f"a remote tier needs a key to sign its entries with: {_HOW}")
        if isinstance(key, str):
            if key not in os.environ:
                raise ValueError(
                    f"remote_key= is the name of an environment variable, and that one is not set: {_HOW}"
                )
            key = os.environ[key].encode()
        if len(key) < _SHORTEST:
            raise ValueError(
                f"the key of the remote tier has {len(key)} bytes, fewer than {_SHORTEST}: {_HOW}"
            )
        self._key = key
        # Tells entries of another key from damaged ones, and reveals nothing about the key.
        self._id = hmac.digest(key, b"ragcachekit key id", _DIGEST)[:_ID_BYTES]

    def sealed(self, digest: str, parts: Sequence[bytes | memoryview]) -> memoryview:
        """The seal and ``parts`` in one buffer, to be stored under the name ``digest``."""
        head = _MAGIC + self._id + self._mac(digest, parts)
        blob = np.empty(len(head) + sum(len(part) for part in parts), np.uint8)
        at = 0
        for part in (head, *parts):
            # Not b"".join, which holds the GIL while it copies.
            blob[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        return blob.data

    def opened(self, digest: str, blob: bytes | bytearray | memoryview) -> memoryview:
        """The entry in ``blob``, verified for the name ``digest``.

        Raises OtherKey if it was sealed with another key, EntryDamaged if a byte or the name is another.
        """
        view = memoryview(blob).toreadonly()
        image = body(view)
        if view[len(_MAGIC) : len(_MAGIC) + _ID_BYTES] != self._id:
            raise OtherKey("sealed with another key")
        if not hmac.compare_digest(view[OVERHEAD - _MAC_BYTES : OVERHEAD], self._mac(digest, (image,))):
            raise EntryDamaged("the entry does not match its seal")
        return image

    def _mac(self, digest: str, parts: Sequence[bytes | memoryview]) -> bytes:
        # Names have a fixed length: no byte can move between name and entry.
        mac = hmac.new(self._key, _MAGIC + digest.encode(), _DIGEST)
        for part in parts:
            mac.update(part)
        return mac.digest()


def body(view: memoryview) -> memoryview:
    """The entry after the seal, not verified; EntryDamaged if there is no seal."""
    if len(view) < OVERHEAD or view[: len(_MAGIC)] != _MAGIC:
        raise EntryDamaged("no sealed entry")
    return view[OVERHEAD:]
