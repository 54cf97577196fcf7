"""API keys: a file of hashes, each with the tenant that its key belongs to."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from threading import Lock
from typing import Any

from filelock import FileLock

from ragcachekit.errors import RagCacheError
from ragcachekit.files import others_may_write, parse_json, read_regular, replace_file
from ragcachekit.server.errors import ApiError

log = logging.getLogger(__name__)

# No "/": what follows one is a partition of the namespace before it.
_NAME = re.compile(r"[\w.@:+-][\w.@:+ -]{0,99}")
_BEARER = re.compile(r"Bearer +(\S+) *", re.IGNORECASE)


@dataclass(frozen=True)
class Limits:
    """Most of what one API key may use; None: no limit.

    - ``requests_per_minute``, ``tokens_per_minute``: Requests, and prompt and answer tokens.
    - ``parallel``: Requests that wait or run at once.
    - ``contexts``, ``context_tokens``: Stored contexts, and tokens of all of them.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    parallel: int | None = None
    contexts: int | None = 1000
    context_tokens: int | None = 10_000_000

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"the limit {limit.name} must be a whole number above 0, or null, not {value!r}"
                )


@dataclass(frozen=True)
class Tenant:
    """The owner of an API key; ``namespace`` partitions every cache."""

    name: str
    namespace: str
    limits: Limits = field(default_factory=Limits)

    def partition(self, *salts: str | None) -> str:
        """The namespace of a request with a ``cache_salt`` and ``prompt_cache_key``; None adds nothing."""
        given = json.dumps({number: salt for number, salt in enumerate(salts) if salt})
        if given == "{}":
            return self.namespace
        return f"{self.namespace}/{hashlib.sha256(given.encode()).hexdigest()[:32]}"


class ApiKeys:
    """The tenants of API keys. Thread safe.

    The file is read again when it has changed. If it cannot be read then, that is logged, and the keys that
    were read before stay valid.

    Parameters
    ----------
    file : path, optional
        JSON as :func:`add_key` writes it. None: every request is ``open_tenant``'s, with any key or none.
        RagCacheError if it cannot be read, is not of that form, or others may write to it.
    """

    def __init__(self, file: Path | None = None, open_tenant: Tenant | None = None) -> None:
        self._file, self._lock = file, Lock()
        self._open = open_tenant or Tenant("open", "default")
        self._stamp: object = None
        self._tenants: dict[str, Tenant] = {}
        if file is not None:
            self._stamp, self._tenants = _stamp(file), _tenants(_read(file))

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """The tenant of a request's key, by its headers' lower-case names; ApiError 401 without a valid one.

        Keys are read from ``Authorization: Bearer KEY`` and from the headers of Google's, Anthropic's and
        Azure's clients. A key in the URL is not read: URLs are written to logs.
        """
        if self._file is None:
            return self._open
        self._reload(self._file)
        header = headers.get("authorization")
        for name in ("x-goog-api-key", "x-api-key", "api-key"):
            if header is None and name in headers:
                header = f"Bearer {headers[name]}"
        challenge = {"WWW-Authenticate": "Bearer"}
        if not (bearer := _BEARER.fullmatch(header or "")):
            message = "You didn't provide an API key: send it in the header 'Authorization: Bearer KEY'."
            raise ApiError(401, message, headers=challenge)
        # By its hash: how long that look-up takes says nothing about the key.
        if (found := self._tenants.get(_digest(bearer[1]))) is None:
            message = "Incorrect API key provided."
            raise ApiError(401, message, code="invalid_api_key", headers=challenge)
        return found

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
            if (stamp := _stamp(file)) == self._stamp:
                return
            self._stamp = stamp
            try:
                self._tenants = _tenants(_read(file))
                log.info("%s: read %d API keys", file, len(self._tenants))
            except RagCacheError as error:
                log.error("the API keys stay those that were read before: %s", error)


def add_key(file: Path, name: str, namespace: str | None = None, limits: Limits | None = None) -> str:
    """Add a key to a file, which is made with mode 0600 if it is missing, and return it.

    The file holds the key's SHA-256 alone. A slow hash would add nothing: nobody guesses 256 random bits.

    ``namespace`` defaults to ``name``. RagCacheError for a name that exists, a bad name, namespace or file.
    """
    key = f"rck-{secrets.token_urlsafe(32)}"  # the prefix lets scanners for secrets find it
    entry: dict[str, Any] = {"name": name, "namespace": namespace or name, "sha256": _digest(key)}
    given = asdict(limits or Limits())
    entry["limits"] = {k: v for k, v in given.items() if v != getattr(Limits(), k)}
    with FileLock(f"{file}.lock", mode=0o600):
        entries = _read(file) if file.exists() else []
        if any(other["name"] == name for other in entries):
            raise RagCacheError(f"{file} has a key named {name!r}; remove it first, or choose another name")
        _write(file, [*entries, entry])
    return key


def remove_key(file: Path, name: str) -> None:
    """Remove a key, which servers then refuse. RagCacheError if there is none of that name."""
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


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _stamp(file: Path) -> object:
    """What changes when the file does; None if it cannot be looked at."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        if others_may_write(file.stat()):
            raise RagCacheError(f"others may write to {file}; run `chmod 600 {file}`")
        entries: list[dict[str, Any]] = parse_json(read_regular(file))["keys"]
        _tenants(entries)
    except OSError as error:
        raise RagCacheError(f"cannot read the API keys: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RagCacheError(
            f'{file} must be {{"keys": [{{"name": ..., "namespace": ..., "sha256": ..., "limits": {{}}}}]}}: '
            f"{error}"
        ) from error
    return entries


def _write(file: Path, entries: list[dict[str, Any]]) -> None:
    try:
        _tenants(entries)
    except ValueError as error:
        raise RagCacheError(str(error)) from error
    replace_file(file, json.dumps({"keys": entries}, indent=2) + "\n")


def _tenants(entries: list[dict[str, Any]]) -> dict[str, Tenant]:
    """Tenants by the digests of their keys; ValueError, TypeError or KeyError for entries of another form."""
    tenants: dict[str, Tenant] = {}
    for entry in entries:
        if unknown := entry.keys() - {"name", "namespace", "sha256", "limits"}:
            raise ValueError(f"unknown field {min(unknown)!r}")
        name, namespace, digest = entry["name"], entry["namespace"], entry["sha256"]
        for given in (name, namespace):
            if not _NAME.fullmatch(given):
                raise ValueError(f"{given!r} is not 1 to 100 letters, digits and . @ : + - _")
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"the hash of {name!r} is no SHA-256")
        if digest in tenants or name in {tenant.name for tenant in tenants.values()}:
            raise ValueError(f"the key {name!r} is listed twice")
        tenants[digest] = Tenant(name, namespace, Limits(**entry.get("limits", {})))
    return tenants
