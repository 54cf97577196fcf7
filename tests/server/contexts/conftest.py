"""A tiny engine, and an application of nothing but contexts."""

from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI

from ragcachekit import RagCache
from ragcachekit.server.context_routes import router
from ragcachekit.server.contexts import ContextStore
from ragcachekit.server.errors import add_handlers
from ragcachekit.server.keys import ApiKeys, Limits, Tenant, Usage, add_key
from ragcachekit.server.middleware import BodyLimit
from speaking import byte_level, speaker

NOW = 1_700_000_000.0


class Clock:
    """A clock that tests move."""

    def __init__(self):
        self.now = NOW

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    with RagCache(
        speaker(), byte_level(), cache_dir=folder, cold="never", policy="lego:4", encoder="standalone"
    ) as rag:
        yield rag


@pytest.fixture
def rag(engine):
    """The session's engine, without anything stored."""
    for namespace in ("ada", "bob"):
        engine.forget(namespace=namespace)
    return engine


@pytest.fixture
def store(rag, clock):
    return ContextStore(rag, clock=clock)


@pytest.fixture
def keys(tmp_path):
    """A file with the keys of two tenants, and the keys."""
    file = tmp_path / "keys.json"
    given = {"ada": add_key(file, "ada", limits=Limits(contexts=3)), "bob": add_key(file, "bob")}
    return file, given


@pytest.fixture
def app(store, keys):
    """The application."""
    app = FastAPI()
    add_handlers(app)
    app.include_router(router(store, "tiny"))
    app.add_middleware(
        BodyLimit, max_bytes=100_000, tenant=ApiKeys(keys[0], Tenant("all", "public")).tenant, usage=Usage()
    )
    return app


@pytest.fixture
def client_of(app, keys):
    """An HTTP client of a tenant."""
    given = keys[1]

    def client(name, key=None):
        transport = httpx.ASGITransport(app)
        return httpx.AsyncClient(
            transport=transport,
            base_url="http://test/v1beta",
            headers={"x-goog-api-key": key or given[name]},
        )

    return client


@pytest.fixture
def ada():
    return Tenant("ada", "ada")


@pytest.fixture
def bob(ada):
    return replace(ada, name="bob", namespace="bob")
