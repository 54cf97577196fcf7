"""The page on fields agrees with the server's schemas, and names every field that the clients know."""

import re
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as texts
from openai.types.chat import completion_create_params as chats
from pydantic import AfterValidator, ValidationError

from ragcachekit.server import context_routes, schemas
from ragcachekit.server.messages import MessagesRequest

PAGE = (Path(__file__).parents[2] / "docs/api_conformance.md").read_text()
KINDS = ("honored", "ignored", "neutral", "refused")
BODIES = {
    "/v1/chat/completions": schemas.ChatRequest,
    "/v1/completions": schemas.TextRequest,
    "/v1/messages": MessagesRequest,
    "/v1beta/cachedContents": context_routes.NewContext,
}
OURS = {"documents", "cached_content", "chunk_ids", "cache_salt", "policy"}
WITH_EFFECT = {"policy", "tool_choice"}  # although only some values are taken


def listed(path):
    """The fields on the page, by kind."""
    section = PAGE.split(f"## {path}\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^- \*\*(\w+)\*\*: (.*)$", section, re.M))
    rows = {kind: re.sub(r"\([^)]*\)", "", row) for kind, row in rows.items()}
    return {kind: set(re.findall(r"`([\w.]+)`", rows.get(kind, ""))) for kind in KINDS}


def kind_of(field):
    checks = [one for one in field.metadata if isinstance(one, AfterValidator)]
    return "neutral" if checks else "ignored" if field.annotation is Any else "honored"


@pytest.mark.parametrize("path", BODIES)
def test_the_page_has_the_fields_of_the_schema(path):
    found, body = listed(path), BODIES[path]
    of_schema = {kind: set() for kind in KINDS}
    for name, field in body.model_fields.items():
        takes_effect = name in WITH_EFFECT and path == "/v1/chat/completions"
        of_schema["honored" if takes_effect else kind_of(field)].add(field.alias or name)
    if path == "/v1/completions":
        of_schema["honored"] -= OURS  # as for chats
        of_schema["neutral"] -= {"policy"}
    assert found["honored"] == of_schema["honored"]
    assert found["neutral"] == of_schema["neutral"]
    assert {name for name in found["ignored"] if "." not in name} == of_schema["ignored"]
    for name in found["refused"]:
        with pytest.raises(ValidationError, match=rf"(?m)^{name}\n +Extra inputs"):
            body.model_validate({name: 1})


def test_what_is_ignored_within_a_field_is_a_lifetime():
    models = (schemas.Breakpoint, schemas.CacheControl)
    assert all("ttl" in model.model_fields for model in models)
    named = {name for name in listed("/v1/chat/completions")["ignored"] if "." in name}
    assert named == {"prompt_cache_breakpoint.ttl", "cache_control.ttl"}


def annotations(path):
    if path != "/v1/messages":
        module = chats if "chat" in path else texts
        return module.CompletionCreateParamsBase.__annotations__
    module = pytest.importorskip("anthropic.types.message_create_params")
    return module.MessageCreateParamsBase.__annotations__


@pytest.mark.parametrize("path", list(BODIES)[:3])
def test_every_field_of_the_client_is_on_the_page(path):
    assert set(annotations(path)) <= set().union(*listed(path).values())
