"""A text is forgotten wherever it stood in a prompt, and not only as a chunk."""

import pytest
from forget_kit import BEFORE, SPACE, TEXTS, Engine, Meanwhile, around

from loading_kit import WAIT
from ragcachekit import Chunk, PrecedingChunks, Prompt, Text
from ragcachekit.errors import StoreError
from ragcachekit.model.kv import token_ids_of
from ragcachekit.store.base import Found
from ragcachekit.store.forgets import ForgottenTexts
from soak_kit import soaked
from tree_kit import nodes

SECRET = "PIN 4417 is Ada's"
SHORT = "PIN 4417"
KEPT = TEXTS[1]
FILL = "The river Spree flows in Berlin, and the river Tiber in Rome. " * 2
ASKED = {"max_new_tokens": 2, "do_sample": False}
STORES = ("gpu", "host", "disk")


@pytest.fixture
def make(tmp_path):
    made = []

    def make(name="one", **options):
        made.append(Engine(tmp_path / name, **{"cold": "now", **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def holding(engine, text, namespace=SPACE):
    """Where KV lies whose tokens hold the text, or begin it at their end: looked at, not asked for."""
    decode = engine.rag.components.parser.tokens.decode
    found = ForgottenTexts([text], lambda ids: decode(ids, special=True))
    out = []
    for key in list(engine.store.keys()):
        opened = engine.store.open(key, 0.0)
        ids = token_ids_of(opened.kv.sums if isinstance(opened, Found) else opened.sums)
        assert ids, "every entry says what it is computed from"
        if key.namespace == namespace and found.within(ids):
            out.append("store")
    for node in nodes(engine.tree):
        ids = [token for step in node.path() for token in step.token_ids]
        if node.root.namespace == namespace and found.begin_in(ids):
            out.append("tree:host")
    disk = engine.tree.disk.store
    for key in list(disk.keys()):
        ids = token_ids_of(disk.get(key).kv.sums)
        if key.namespace == namespace and found.begin_in(ids):
            out.append("tree:disk")
    turns = [turn for turn in engine.tree.turns.kept.values() if turn.root.namespace == namespace]
    out += ["turns" for turn in turns if found.begin_in(turn.token_ids)]
    return sorted(set(out))


def reused_from(engine, prompt, text):
    """Whether a prompt reuses rows of the text, which stands in it."""
    plan = engine.rag.plan(engine.rag.prepare(prompt))
    kept = [token for at, token in enumerate(plan.token_ids) if at not in set(plan.rows)]
    return text in engine.rag.components.parser.tokens.decode(kept, special=True)


def chat(*turns):
    roles = ["system", *["user", "assistant"] * len(turns)]
    return [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]


PROMPTS = {
    "plain": FILL + SECRET + ". " + FILL,
    "question": Prompt([Text(BEFORE), Chunk(KEPT), Text(f"\n{FILL}{SECRET}? {FILL}")]),
    "before the first chunk": Prompt([Text(f"{FILL}{SECRET}\n{FILL}"), Chunk(KEPT), Text("\nWhere?")]),
    "between chunks": Prompt([Text(BEFORE), Chunk(TEXTS[0]), Text(f"\n{SECRET}\n"), Chunk(KEPT), Text("?")]),
    "part of a chunk": Prompt([Text(BEFORE), Chunk(f"{FILL}{SECRET}. {FILL}"), Text("\nWhere?")]),
    "system message": chat(f"{FILL}{SECRET}. {FILL}", "Where does the river flow?"),
    "user message": chat(FILL, f"{SECRET}. {FILL}"),
    "earlier turn": chat(FILL, f"{FILL}{SECRET}", "So it is.", f"Where? {FILL}"),
}


@pytest.mark.parametrize("given", soaked([SHORT, "PIN  4417\nis"], "PIN  4417\nis"))
@pytest.mark.parametrize("where", list(PROMPTS))
def test_a_text_goes_from_wherever_it_stood(make, where, given):
    engine = make()
    for _ in range(2):
        engine.rag.generate(PROMPTS[where], **ASKED)
    assert holding(engine, SHORT)
    assert engine.rag.forget(texts=[given]) > 0
    assert holding(engine, SHORT) == []
    assert not reused_from(engine, PROMPTS[where], SHORT)
    assert engine.rag.forget(texts=[given]) == 0


@pytest.mark.parametrize("encoder", ["standalone", "system", "in-prompt", "average:2", "similar:2"])
def test_entries_behind_the_text_go_too(make, encoder):
    near = {"neighbours": PrecedingChunks([[TEXTS[0], FILL + SECRET, KEPT]])} if "similar" in encoder else {}
    engine = make(encoder=encoder, **near)
    chunks = (TEXTS[0], FILL + SECRET, KEPT)
    middle = [part for text in chunks for part in (Chunk(text), Text("\n"))]
    engine.rag.encode(chunks, system=BEFORE)
    engine.rag.generate(Prompt([Text(BEFORE), *middle, Text("Where?")]), **ASKED)
    engine.rag.generate(Prompt([Text(BEFORE + SECRET), *middle, Text("Where?")]), **ASKED)
    assert "store" in holding(engine, SECRET)
    assert engine.rag.forget(texts=[SECRET]) > 0
    assert holding(engine, SECRET) == []


def test_what_does_not_hold_the_text_stays(make):
    engine = make()
    for prompt in (PROMPTS["plain"], FILL + "And nothing else. " + FILL, PROMPTS["question"]):
        engine.rag.generate(prompt, **ASKED)
    engine.rag.encode([KEPT])
    other = engine.rag.generate(FILL + "And nothing else. " + FILL, **ASKED).report.link.exact_tokens
    engine.rag.forget(texts=[SECRET])
    assert engine.rag.generate(FILL + "And nothing else. " + FILL, **ASKED).report.link.exact_tokens == other
    assert set(STORES[1:]) <= set(engine.left(engine.chunk_ids([KEPT])))
    reused = engine.rag.generate(PROMPTS["plain"], **ASKED).report.link.exact_tokens
    assert 0 < reused <= engine.rag.count_tokens(FILL) + 1, "what stands before the text"


def test_a_conversation_that_goes_on(make):
    engine = make(policy="prefix")
    messages = chat(FILL, f"{FILL}{SECRET}")
    for question in ("Where does it flow?", "And in Rome?"):
        said = engine.rag.generate(messages, **ASKED).text
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": question + FILL}]
    assert {"tree:host", "turns"} <= set(holding(engine, SECRET))
    engine.rag.forget(texts=[SECRET])
    assert holding(engine, SECRET) == []
    assert not reused_from(engine, messages, SHORT)


@pytest.mark.parametrize("where", ["plain", "part of a chunk"])
def test_the_tree_and_the_store_on_disk_after_a_restart(make, where):
    first = make()
    for text in (PROMPTS[where], FILL + "And nothing else. " + FILL):
        first.rag.generate(text, **ASKED)
    first.close()
    again = make()
    assert "tree:disk" in holding(again, SECRET)
    assert again.rag.forget(texts=[SECRET]) > 0
    assert holding(again, SECRET) == []
    assert again.rag.generate(FILL + "And nothing else. " + FILL, **ASKED).report.link.exact_tokens > 0


def test_another_process_drops_it_from_its_tree(make):
    one, other = make(), make()
    for engine in (one, other):
        engine.rag.generate(PROMPTS["plain"], **ASKED)
    one.rag.forget(texts=[SECRET])
    assert not reused_from(other, PROMPTS["plain"], SHORT)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", ["parse", "prepare", "match", "forward", "insert"])
@pytest.mark.parametrize("where", soaked(["plain", "part of a chunk"], "part of a chunk"))
def test_forget_while_a_prompt_with_the_text_is_answered(make, monkeypatch, where, step, after):
    engine = make(cold="background")
    owner, name = {
        "parse": (engine.rag.components.parser, "parse"),
        "prepare": (engine.rag.components.planner, "prepare"),
        "match": (engine.tree, "match"),
        "forward": (engine.rag.model.base_model, "forward"),
        "insert": (engine.tree, "insert"),
    }[step]
    meanwhile = Meanwhile(lambda: engine.rag.forget(texts=[SHORT]), wait=step != "insert")
    around(monkeypatch, owner, name, meanwhile, after)
    engine.rag.generate(PROMPTS[where], **ASKED)
    assert engine.rag.flush(WAIT)
    assert meanwhile.finish()
    assert holding(engine, SHORT) == []


def test_a_store_that_cannot_be_searched_drops_what_is_known_and_says_so(make, monkeypatch):
    engine = make()
    engine.rag.encode([KEPT, TEXTS[0]])

    def broken(_):
        raise OSError("gone")

    monkeypatch.setattr(engine.store, "sums", broken)
    with pytest.raises(StoreError, match="could not be searched"):
        engine.rag.forget(texts=[KEPT])
    assert engine.left(engine.chunk_ids([KEPT])) == []


def test_a_tier_that_lists_nothing_is_warned_of(make, monkeypatch, caplog):
    engine = make()
    engine.rag.encode([KEPT])
    monkeypatch.setattr(engine.store, "keys", lambda: iter(()))
    engine.rag.forget(texts=["Nothing has this"])
    assert "does not list its entries" in caplog.text
