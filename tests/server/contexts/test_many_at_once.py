"""Contexts made, prolonged, deleted, expired and abandoned at once: what is cached is what is stored."""

import asyncio
import random
from contextlib import suppress

import pytest

from engine_kit import stored_in
from ragcachekit import RagCache
from ragcachekit.server.contexts import ContextStore
from ragcachekit.server.errors import ApiError
from ragcachekit.server.keys import Tenant
from speaking import WORDS, byte_level, speaker

TENANTS = [Tenant(name, name) for name in ("ada", "bob", "eve")]


def cached(rag):
    return {(key.namespace, key.chunk_id) for key in stored_in(rag) if key.encoding != "prefix"}


@pytest.mark.parametrize("steps", [40, pytest.param(4000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kept_in", ["memory", "files"])
async def test_what_is_cached_is_what_is_stored(tmp_path, kept_in, steps):
    draw, folder = random.Random(steps), tmp_path / "contexts" if kept_in == "files" else None
    texts = [" ".join(draw.choices(WORDS.split(), k=8)) + "." for _ in range(12)]
    with RagCache(speaker(), byte_level(), cache_dir=tmp_path, cold="never", policy="lego:4") as rag:
        store = ContextStore(rag, folder)

        async def make(tenant):
            seconds = draw.choice([0.05, 60.0])
            chunks = [*draw.sample(texts, 2), f"of its own {draw.random()}"]
            work = store.create(tenant, chunks, model="m", lifetime=lambda now: now + seconds)
            task = asyncio.create_task(work)
            if draw.random() < 0.4:
                await asyncio.sleep(draw.random() * 0.03)
                task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or task.exception() is None

        async def end(tenant):
            names = [context.name for context in store.all(draw.choice(TENANTS))]
            if names:
                with suppress(ApiError):  # another tenant's, or gone meanwhile
                    await store.delete(tenant, draw.choice(names))

        async def client():
            for _ in range(steps // 8):
                await draw.choice([make, make, end])(draw.choice(TENANTS))

        sweeping = asyncio.create_task(store.run(every=0.01))
        await asyncio.gather(*(client() for _ in range(8)))
        await asyncio.sleep(0.06)
        sweeping.cancel()
        await asyncio.wait([sweeping])
        await store.expire()
        live = [context for tenant in TENANTS for context in store.all(tenant)]
        assert live
        assert cached(rag) == {(context.namespace, i) for context in live for i in context.chunk_ids}
        for tenant in TENANTS:
            for context in store.all(tenant):
                await store.delete(tenant, context.name)
        assert cached(rag) == set()
        assert folder is None or [path for path in folder.rglob("*") if path.is_file()] == []
