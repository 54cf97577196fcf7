"""The page on fields agrees with the server's schemas, and names every field that the clients know."""

import ast
import os
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import AfterValidator, ValidationError
from pydantic.alias_generators import to_camel

from ragcachekit.server import context_routes, schemas
from ragcachekit.server.messages import CountRequest, MessagesRequest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/api_conformance.md").read_text()
KINDS = ("honored", "ignored", "neutral", "refused")
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES = {
    CHAT: schemas.ChatRequest,
    TEXT: schemas.TextRequest,
    RESPONSES: schemas.ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1beta/cachedContents": context_routes.NewContext,
}
# The clients: those of the tests' environment, and those beside it.
INSTALLED = Path(openai.__file__).parents[1], Path(os.environ.get("CLIENTS") or ROOT / ".venv/clients")
PARAMETERS = {
    CHAT: ("openai/types/chat/completion_create_params.py", "CompletionCreateParamsBase"),
    TEXT: ("openai/types/completion_create_params.py", "CompletionCreateParamsBase"),
    RESPONSES: ("openai/types/responses/response_create_params.py", "ResponseCreateParamsBase"),
    "/v1/messages": ("anthropic/types/message_create_params.py", "MessageCreateParamsBase"),
    "/v1/messages/count_tokens": (
        "anthropic/types/message_count_tokens_params.py", "MessageCountTokensParams"
    ),
    "/v1beta/cachedContents": ("google/genai/types.py", "CreateCachedContentConfigDict"),
}  # fmt: skip
WITH_EFFECT = {"policy": BODIES, "tool_choice": [CHAT]}  # although only some values are taken


def listed(path):
    """The fields on the page, by kind."""
    found = {kind: set() for kind in KINDS}
    for heading in [
        path.removesuffix("/count_tokens"),
        *(["OpenAI"] if path in (CHAT, TEXT, RESPONSES) else []),
    ]:
        section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
        for kind, row in re.findall(r"^- \*\*(\w+)\*\*: (.*)$", section, re.M):
            found[kind] |= set(re.findall(r"`([\w.]+)`", re.sub(r"\([^)]*\)", "", row)))
    return found


def kind_of(field):
    checks = [one for one in field.metadata if isinstance(one, AfterValidator)]
    return "neutral" if checks else "ignored" if field.annotation is Any else "honored"


@pytest.mark.parametrize("path", BODIES)
def test_the_page_has_the_fields_of_the_schema(path):
    found, body = listed(path), BODIES[path]
    of_schema = {kind: set() for kind in KINDS}
    for name, field in body.model_fields.items():
        takes_effect = path in WITH_EFFECT.get(name, ())
        of_schema["honored" if takes_effect else kind_of(field)].add(field.alias or name)
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


def fields_of_clients(path):
    """The annotations of a class, without an import: the clients beside cannot be loaded here."""
    file, name = PARAMETERS[path]
    for text in [(folder / file).read_text() for folder in INSTALLED if (folder / file).is_file()]:
        (source,) = re.findall(rf"^class {name}\(.*?(?=^\S|\Z)", text, re.M | re.S)
        body = ast.parse(source).body[0].body
        yield {node.target.id for node in body if isinstance(node, ast.AnnAssign)}


@pytest.mark.parametrize("path", PARAMETERS)
def test_every_field_of_the_client_is_on_the_page(path):
    if not (clients := list(fields_of_clients(path))):
        pytest.skip("this client is not installed")
    for fields in clients:
        assert len(fields) > 5
        if "cachedContents" in path:
            fields = {to_camel(field) for field in fields - {"http_options"}}
        assert fields - set().union(*listed(path).values()) == set()


def test_tokens_are_counted_of_what_a_message_has():
    assert set(CountRequest.model_fields) == set(MessagesRequest.model_fields)
    assert not CountRequest.model_fields["max_tokens"].is_required()
