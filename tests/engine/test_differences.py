"""What a prompt made of a document is named, and the first difference is shown."""

from __future__ import annotations

import html
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcachekit.engine.inspection import difference

TEXT = (
    'The "Old Mill" stands by the river; it was built in 1874.\nIts wheel was made of oak & iron.\n\n'
    "Nobody has ground flour there since the flood, and the town keeps it as a museum."
)
AROUND = "Answer from the context.\n\n{}\n\nWhere does the river flow?"


def why(document: str, made: str) -> str:
    return difference(document, AROUND.replace("{}", made)).why


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("HTML-escaped", html.escape(TEXT)),
        ("HTML-escaped", TEXT.replace("&", "&amp;").replace('"', "&#34;")),
        ("JSON-escaped", json.dumps(TEXT)),
        ("printed as Python", f"[Document(page_content={TEXT!r})]"),
        ("whitespace", TEXT.replace("\n", " ")),
        ("whitespace", TEXT.replace("\n", "\n    ")),
        ("upper or lower case", TEXT.lower()),
        ("truncated", TEXT[:90]),
        ("truncated", TEXT[:90] + "..."),
        ("altered", TEXT[70:]),
        ("altered", TEXT[:80] + "\nsource: mill.txt\n" + TEXT[80:]),
        ("altered", TEXT.replace("oak", "wood")),
        ("absent", "Paris is the capital of France; the river Seine flows in Paris."),
    ],
)
def test_kinds(kind, made) -> None:
    assert why(TEXT, made) == kind


def test_the_unicode_form_is_named() -> None:
    assert why(
        "Ein Caf\u00e9 in der Stra\ufb02e am Fluss, im ersten Stock.",
        "Ein Café in der Strafle am Fluss, im ersten Stock.",
    ) == ("Unicode form")


def test_the_first_difference_is_shown() -> None:
    found = difference(TEXT, AROUND.replace("{}", TEXT.replace("oak", "wood")))
    assert (found.document[:15], found.prompt[:16]) == (" was made of oak"[1:], " was made of wood"[1:])


@given(st.text(max_size=300), st.text(max_size=300))
def test_nothing_makes_it_fail(document, prompt) -> None:
    assert difference(document, prompt).why
