"""Answers over HTTP: `pip install fastapi uvicorn`, then `python examples/fastapi_service.py [--model PATH]`.

POST /answer takes {"question": ..., "documents": [...]}, and the tenant in a header: take it from your
authentication instead.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

from ragcachekit import DeadlineExceeded, QueueConfig, QueueFull, RagCache, agenerate


class Question(BaseModel):
    """A question, and the documents that were retrieved for it."""

    question: str
    documents: list[str]


def service(model: str) -> FastAPI:
    """The application; its engine is made when it starts, after any fork."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with RagCache.from_pretrained(model, queue=QueueConfig(max_waiting=64)) as app.state.rag:
            yield

    app = FastAPI(title="RagCacheKit", lifespan=lifespan)

    @app.post("/answer")
    async def answer(asked: Question, tenant: Annotated[str, Header()]) -> dict[str, Any]:
        rag: RagCache = app.state.rag
        rag.register(asked.documents, namespace=tenant)
        content = "\n\n".join(["Answer from the context.", *asked.documents, asked.question])
        messages = [{"role": "user", "content": content}]
        options: dict[str, Any] = {"namespace": tenant, "deadline": 60.0, "wait": False}
        try:
            found = await agenerate(rag, messages, max_new_tokens=64, **options)
        except (QueueFull, DeadlineExceeded) as error:
            raise HTTPException(503, f"try again in a few seconds: {error}") from error
        return {"text": found.text, "reused_tokens": found.report.link.reused_tokens}

    return app


if __name__ == "__main__":
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sample", help="folder or hub id")
    uvicorn.run(service(parser.parse_args().model), port=8000)
