"""API keys, the tenants that they belong to, and what each tenant may use."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import logging
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path
from threading import Lock
from typing import Annotated

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from ragcachekit.errors import RagCacheError
from ragcachekit.files import others_may_write, read_regular, replace_file
from ragcachekit.server.errors import ApiError

log = logging.getLogger(__name__)

MINUTE = 60.0

_STRICT = ConfigDict(strict=True, extra="forbid")
_ROUNDING = 1e-6  # seconds, so that a request is admitted after the time that its refusal named
_BEARER = re.compile(r"Bearer +(\S+) *", re.IGNORECASE)
# No "/": what follows one is a partition of the namespace before it.
_Name = Annotated[str, Field(pattern=r"^[\w.@:+-][\w.@:+ -]{0,99}$")]
_Limit = Annotated[int, Field(ge=1)] | None


@dataclass(frozen=True, config=_STRICT)
class Limits:
    """Most of what one API key may use; None: no limit.

    - ``requests_per_minute``, ``tokens_per_minute``: Requests, and prompt and answer tokens.
    - ``parallel``: Requests that wait or run at once.
    - ``contexts``, ``context_tokens``: Stored contexts, and tokens of all of them.
    """

    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    parallel: _Limit = None
    contexts: _Limit = 1000
    context_tokens: _Limit = 10_000_000


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


# -- the file of keys -----------------------------------------------------------------------------------


class _Key(BaseModel):
    model_config = _STRICT
    name: _Name
    namespace: _Name
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    limits: Limits = Limits()


class _KeyFile(BaseModel):
    model_config = _STRICT
    keys: list[_Key]


class ApiKeys:
    """The tenants of API keys; without a file every request is ``open_tenant``'s. Thread safe.

    RagCacheError for a file that is not as :func:`add_key` writes it, or that others may write to. It is read
    again when it has changed; if that fails, the error is logged and the old keys stay valid.
    """

    def __init__(self, file: Path | None, open_tenant: Tenant) -> None:
        self._file, self._lock, self._open = file, Lock(), open_tenant
        self._stamp: object = None
        self._tenants: dict[str, Tenant] = {}
        if file is not None:
            self._stamp, self._tenants = _stamp(file), _tenants(file)

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """The tenant of a request's key; ApiError 401 without a valid one.

        A key in the URL is not read, as Google's clients could send it: URLs are written to logs.
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
        with suppress(ApiError):
            return bool(self.tenant(headers))
        return False

    def _reload(self, file: Path) -> None:
        with self._lock:
            if (stamp := _stamp(file)) == self._stamp:
                return
            self._stamp = stamp
            try:
                self._tenants = _tenants(file)
                log.info("%s: read %d API keys", file, len(self._tenants))
            except RagCacheError as error:
                log.error("keeping the API keys that were read last: %s", error)


def add_key(file: Path, name: str, namespace: str | None = None, limits: Limits | None = None) -> str:
    """Add a key to a file, which is made if it is missing, and return it; the file holds its SHA-256.

    A slow hash would add nothing: nobody guesses 256 random bits. ``namespace`` defaults to ``name``.
    RagCacheError for a name that exists, a bad name, namespace or file.
    """
    key = f"rck-{secrets.token_urlsafe(32)}"  # the prefix lets scanners for secrets find it
    with FileLock(f"{file}.lock", mode=0o600):
        keys = _read(file) if file.exists() else []
        if any(other.name == name for other in keys):
            raise RagCacheError(f"{file} has a key named {name!r}; remove it first, or choose another name")
        try:
            new = _Key(name=name, namespace=namespace or name, sha256=_digest(key), limits=limits or Limits())
        except ValidationError as error:
            given = error.errors()[0]["input"]
            raise RagCacheError(f"{given!r} is not 1 to 100 letters, digits and . @ : + - _") from error
        _write(file, [*keys, new])
    return key


def remove_key(file: Path, name: str) -> None:
    """Remove a key, which servers then refuse. RagCacheError if there is none of that name."""
    with FileLock(f"{file}.lock", mode=0o600):
        keys = _read(file)
        if not any(key.name == name for key in keys):
            raise RagCacheError(f"{file} has no key named {name!r}")
        _write(file, [key for key in keys if key.name != name])


def check_exposure(host: str, keys: Path | None, no_keys: bool) -> None:
    """RagCacheError if a server without keys would be reachable from other machines, unless ``no_keys``."""
    if keys is None and not no_keys and not _is_loopback(host):
        raise RagCacheError(
            f"anybody who can reach {host} could use this server; give --keys FILE (`ragcachekit keys add`), "
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


def _read(file: Path) -> list[_Key]:
    try:
        if others_may_write(file.stat()):
            raise RagCacheError(f"others may write to {file}; run `chmod 600 {file}`")
        return _KeyFile.model_validate_json(read_regular(file)).keys
    except OSError as error:
        raise RagCacheError(f"cannot read the API keys: {error}") from error
    except ValidationError as error:
        wrong = error.errors()[0]
        raise RagCacheError(
            f'{file} must be {{"keys": [{{"name": ..., "namespace": ..., "sha256": ..., "limits": {{}}}}]}}: '
            f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
        ) from error


def _write(file: Path, keys: list[_Key]) -> None:
    replace_file(file, _KeyFile(keys=keys).model_dump_json(indent=2, exclude_defaults=True) + "\n")


def _tenants(file: Path) -> dict[str, Tenant]:
    """Tenants by the digests of their keys."""
    return {key.sha256: Tenant(key.name, key.namespace, key.limits) for key in _read(file)}


# -- what tenants use -----------------------------------------------------------------------------------


class _Account:
    """What one tenant uses. Requests and tokens drain within a minute."""

    def __init__(self) -> None:
        self.running, self.drained_at = 0, 0.0
        self.used = {"requests": 0.0, "tokens": 0.0}


class Usage:
    """What tenants use now, and used in the last minute. For one event loop; ``clock`` gives seconds.

    A tenant may use a minute's limit at once, and then as much as drains. An answer whose length is known
    only at its end may exceed the limit; later requests wait until that has drained.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts = defaultdict[str, _Account](_Account)

    @contextmanager
    def admit(self, tenant: Tenant) -> Iterator[Grant]:
        """Count one request, and let it run until the block ends; ApiError 429 beyond a limit."""
        account, most = self._accounts[tenant.name], tenant.limits.parallel
        if most is not None and account.running >= most:
            raise _refusal(f"{tenant.name!r} may have {most} requests at once.", "requests", 1.0)
        grant = Grant(tenant, account, self._clock)
        grant.check("requests", 1)
        account.used["requests"] += 1
        account.running += 1
        try:
            yield grant
        finally:
            account.running -= 1


class Grant:
    """A request that was admitted."""

    def __init__(self, tenant: Tenant, account: _Account, clock: Callable[[], float]) -> None:
        self._tenant, self._account, self._clock, self._charged = tenant, account, clock, 0

    def expect(self, tokens: int) -> None:
        """Charge the tokens that are known before the answer; ApiError 429 beyond a limit."""
        self.check("tokens", tokens)
        self.charge(tokens)

    def charge(self, tokens: int) -> None:
        """Charge these tokens instead of those before, without a check; may be repeated."""
        self._account.used["tokens"] += tokens - self._charged
        self._charged = tokens

    def check(self, kind: str, amount: int) -> None:
        """ApiError if ``amount`` more requests or tokens are beyond the limit."""
        name, own, account = self._tenant.name, self._tenant.limits, self._account
        limits = {"requests": own.requests_per_minute, "tokens": own.tokens_per_minute}
        now = self._clock()
        minutes, account.drained_at = (now - account.drained_at) / MINUTE, now
        for each, most in limits.items():
            account.used[each] = 0.0 if most is None else max(0.0, account.used[each] - minutes * most)
        if (limit := limits[kind]) is None:
            return
        if (wait := (account.used[kind] + amount - limit) * MINUTE / limit) > _ROUNDING:
            message = f"Rate limit reached for {name!r}: {limit} {kind} per minute, requested {amount}."
            raise _refusal(message, kind, wait if amount <= limit else None)  # waiting would not help


def _refusal(message: str, kind: str, wait: float | None) -> ApiError:
    return ApiError(429, message, kind=kind, code="rate_limit_exceeded", retry_after=wait)
