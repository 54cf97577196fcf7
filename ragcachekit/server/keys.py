"""API keys: a file of hashes, each with the tenant that its key stands for."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from threading import Lock
from typing import Any

from filelock import FileLock

from ragcachekit.errors import RagCacheError
from ragcachekit.files import others_may_write, parse_json, read_regular, replace_file
from ragcachekit.server.errors import ApiError
from ragcachekit.server.tenants import Limits, Tenant

log = logging.getLogger(__name__)

CHECK_EVERY = 1.0
"""Seconds between two looks whether the file of keys has changed."""

# No "/": what follows one is a partition of the namespace before it.
_NAME = re.compile(r"[\w.@:+-][\w.@:+ -]{0,99}")
_LIMITS = frozenset(field.name for field in fields(Limits))
_BEARER = re.compile(r"Bearer +(\S+) *", re.IGNORECASE)


class ApiKeys:
    """The tenants of API keys. Thread safe.

    The file is read again when it changes. One that cannot be read then is logged, and the keys that were
    read last stay valid.

    Parameters
    ----------
    file : path, optional
        JSON as :func:`add_key` writes it. None: every request is ``open_tenant``'s, with any key or none.
        RagCacheError if it cannot be read, is not of that form, or others may write to it.
    clock : callable
        Seconds, for the time of the next look at the file.
    """

    def __init__(
        self,
        file: Path | None = None,
        open_tenant: Tenant | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file, self._clock, self._lock = file, clock, Lock()
        self._open = open_tenant or Tenant("open", "default")
        self._tenants: dict[bytes, Tenant] = {}
        if file is not None:
            self._stamp, self._looked = _stamp(file), clock()
            self._tenants = _tenants(_read(file))

    def authenticate(self, header: str | None) -> Tenant:
        """The tenant of an ``Authorization: Bearer KEY`` header; ApiError 401 for a missing or wrong key."""
        if self._file is None:
            return self._open
        self._reload(self._file)
        challenge = {"WWW-Authenticate": "Bearer"}
        if not (bearer := _BEARER.fullmatch(header or "")):
            message = "You didn't provide an API key: send it in the header 'Authorization: Bearer KEY'."
            raise ApiError(401, message, headers=challenge)
        given, found = _digest(bearer[1]), None
        for digest, tenant in self._tenants.items():  # all of them: the time tells nothing of the key
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            message = "Incorrect API key provided."
            raise ApiError(401, message, code="invalid_api_key", headers=challenge)
        return found

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """As :meth:`authenticate`, for a request's headers.

        Also reads the headers of Google's, Anthropic's and Azure's clients. A key in the URL is not read:
        URLs are written to logs.
        """
        header = headers.get("authorization")
        for name in ("x-goog-api-key", "x-api-key", "api-key"):
            if header is None and name in headers:
                header = f"Bearer {headers[name]}"
        return self.authenticate(header)

    def allows(self, host: str, headers: Mapping[str, str]) -> bool:
        """Whether there are no keys, or a client at ``host`` has one or is on the server's machine."""
        if self._file is None or _is_loopback(host):
            return True
        try:
            return bool(self.tenant(headers))
        except ApiError:
            return False

    def _reload(self, file: Path) -> None:
        with self._lock:
            if self._clock() - self._looked < CHECK_EVERY:
                return
            self._looked = self._clock()
            try:
                if (stamp := _stamp(file)) != self._stamp:
                    self._tenants, self._stamp = _tenants(_read(file)), stamp
                    log.info("%s: read %d API keys", file, len(self._tenants))
            except (OSError, RagCacheError) as error:
                log.error("the API keys stay those that were read before: %s", error)


def add_key(file: Path, name: str, namespace: str | None = None, limits: Limits | None = None) -> str:
    """Add a key to a file, which is made with mode 0600 if it is missing, and return it.

    The file holds the key's SHA-256 alone. A slow hash would add nothing: nobody guesses 256 random bits.

    ``namespace`` defaults to ``name``. RagCacheError for a name that exists, a bad name, namespace or file.
    """
    key = f"rck-{secrets.token_urlsafe(32)}"  # the prefix lets scanners for secrets find it
    entry: dict[str, Any] = {"name": name, "namespace": namespace or name, "sha256": _digest(key).hex()}
    given = asdict(limits or Limits())
    entry["limits"] = {k: v for k, v in given.items() if v != getattr(Limits(), k)}
    with FileLock(f"{file}.lock", mode=0o600):
        entries = _read(file) if file.exists() else []
        if any(other["name"] == name for other in entries):
            raise RagCacheError(f"{file} has a key named {name!r}; remove it first, or choose another name")
        _write(file, [*entries, entry])
    return key


def remove_key(file: Path, name: str) -> None:
    """Remove a key; servers refuse it a second later. RagCacheError if there is none of that name."""
    with FileLock(f"{file}.lock", mode=0o600):
        entries = _read(file)
        if not any(entry["name"] == name for entry in entries):
            raise RagCacheError(f"{file} has no key named {name!r}")
        _write(file, [entry for entry in entries if entry["name"] != name])


def check_exposure(host: str, keys: Path | None, no_keys: bool) -> None:
    """RagCacheError if a server without keys would be reachable from other machines, unless ``no_keys``."""
    if keys is None and not no_keys and not _is_loopback(host):
        raise RagCacheError(
            f"everybody who reaches {host} could use this server; give --keys FILE (`ragcachekit keys add`), "
            "or --no-keys if something else keeps strangers out"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        status = file.stat()
    except OSError as error:
        raise RagCacheError(f"cannot read the API keys: {error}") from error
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        if others_may_write(file.stat()):
            raise RagCacheError(f"others may write to {file}; run `chmod 600 {file}`")
        entries = parse_json(read_regular(file))["keys"]
        _tenants(entries)
    except OSError as error:
        raise RagCacheError(f"cannot read the API keys: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RagCacheError(
            f'{file} must be {{"keys": [{{"name": ..., "namespace": ..., "sha256": ..., "limits": {{}}}}]}}: '
            f"{error}"
        ) from error
    return list(entries)


def _write(file: Path, entries: list[dict[str, Any]]) -> None:
    try:
        _tenants(entries)
    except ValueError as error:
        raise RagCacheError(str(error)) from error
    replace_file(file, json.dumps({"keys": entries}, indent=2) + "\n")


def _tenants(entries: list[dict[str, Any]]) -> dict[bytes, Tenant]:
    tenants: dict[bytes, Tenant] = {}
    for entry in entries:
        if unknown := entry.keys() - {"name", "namespace", "sha256", "limits"}:
            raise ValueError(f"unknown field {min(unknown)!r}")
        for field in ("name", "namespace"):
            if not _NAME.fullmatch(entry[field]):
                raise ValueError(f"{field} {entry[field]!r} is not 1 to 100 letters, digits and . @ : + - _")
        digest = bytes.fromhex(entry["sha256"])
        if len(digest) != 32 or digest in tenants or entry["name"] in {t.name for t in tenants.values()}:
            raise ValueError(f"the key {entry['name']!r} stands there twice, or its hash is no SHA-256")
        tenants[digest] = Tenant(entry["name"], entry["namespace"], _limits(entry.get("limits", {})))
    return tenants


def _limits(given: Mapping[str, Any]) -> Limits:
    for name, value in given.items():
        if name not in _LIMITS:
            raise ValueError(f"unknown limit {name!r}; there are {', '.join(sorted(_LIMITS))}")
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"the limit {name} must be a whole number above 0, or null, not {value!r}")
    return Limits(**given)
