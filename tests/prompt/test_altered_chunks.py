"""Retrieved chunks that the chain changed are recognised as such; nothing else is."""

from __future__ import annotations

import textwrap

import pytest

from ragcachekit.prompt.altered import MOST_CHUNKS, Retrieved
from ragcachekit.prompt.registry import ChunkRegistry
from ragcachekit.prompt.segment import segment_text

BERLIN = "Berlin is the capital of Germany.\nThe river Spree  flows in Berlin,\nwith lakes around."
PARIS = "Paris is the capital of France;\nthe river Seine flows in Paris, under many bridges."


@pytest.fixture
def registry():
    registry = ChunkRegistry()
    registry.add("default", [BERLIN, PARIS])
    return registry


@pytest.fixture
def retrieved():
    retrieved = Retrieved()
    retrieved.observe("default", [BERLIN, PARIS])
    return retrieved


def noted(retrieved, registry, text, namespace="default"):
    return retrieved.altered(namespace, segment_text(text, registry, namespace).prompt)


CHANGES = {
    "spaces": lambda text: " ".join(text.split()),
    "cut": lambda text: text[:70],
    "case": str.lower,
    "indent": lambda text: textwrap.indent(text, "    "),
    "fill": lambda text: textwrap.fill(text, 30),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_chains_do_to_documents(retrieved, registry, change):
    both = "\n\n".join(CHANGES[change](text) for text in (BERLIN, PARIS))
    (note,) = noted(retrieved, registry, f"Context:\n{both}\n\nWhere?")
    assert note.startswith("2 retrieved chunks stand in the prompt, but altered")
    one = CHANGES[change](PARIS)
    (note,) = noted(retrieved, registry, f"Context:\n{BERLIN}\n\n{one}\n\nWhere?")
    assert note.startswith("1 retrieved chunk stands in the prompt, but altered")


@pytest.mark.parametrize(
    "prompt",
    [
        f"Context:\n{BERLIN}\n\n{PARIS}\nWhere?",
        f"Context:\n{BERLIN}\nWhere?",  # a reranker left the other one out
        "Where does the river flow, in Berlin or Paris?",
        "",
    ],
)
def test_nothing_is_said_where_nothing_was_altered(retrieved, registry, prompt):
    assert noted(retrieved, registry, prompt) == ()


def test_chunks_under_one_heading_are_not_mixed_up(registry):
    heading = "Manual of the coffee machine, second edition, chapter four: cleaning\n"
    used, unused = heading + "Descale it once a month.", heading + "Never immerse it in water."
    registry.add("default", [used, unused])
    retrieved = Retrieved()
    retrieved.observe("default", [used, unused])
    assert noted(retrieved, registry, f"Context:\n{used}\nHow?") == ()


def test_short_texts_and_other_tenants_are_left_out(retrieved, registry):
    retrieved.observe("default", ["is the"])
    assert noted(retrieved, registry, "What IS  THE answer?") == ()
    assert noted(retrieved, registry, BERLIN.lower(), "other") == ()
    retrieved.forget("default")
    assert noted(retrieved, registry, BERLIN.lower()) == ()


def test_only_the_last_ones_are_remembered(retrieved, registry):
    retrieved.observe("default", [f"chunk number {n} of very many" for n in range(MOST_CHUNKS)])
    assert noted(retrieved, registry, BERLIN.lower()) == ()
