"""What is forgotten while work is under way stays forgotten, in every tier; nothing else is lost by it."""

import itertools
import random

import pytest
from forget_kit import BEFORE, SPACE, TEXTS, Engine, Meanwhile, around, prompt_of

from loading_kit import WAIT
from ragcachekit import Chunk, PrecedingChunks, Prompt, Text
from soak_kit import figures, soaked

GONE, KEPT, THIRD, FOURTH = TEXTS
GRADES = ("linked", "prefix")
ASKED = {"max_new_tokens": 2, "do_sample": False}
MARKED = Prompt([Text(BEFORE), Chunk(GONE), Text("\n"), Chunk(KEPT), Text("\nWhere?")])
"""Names its chunks: it does not depend on which texts are registered."""


@pytest.fixture
def make(tmp_path):
    made = []

    def make(**options):
        made.append(Engine(tmp_path / str(len(made)), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def forget_of(engine, what):
    """What is forgotten (its ids, None for all), and the call that does it."""
    ids = engine.chunk_ids([GONE])
    calls = {
        "texts": lambda: engine.rag.forget(texts=[GONE]),
        "ids": lambda: engine.rag.forget(ids),
        "namespace": lambda: engine.rag.forget(),
    }
    return (None if what == "namespace" else ids), calls[what]


# What encode calls, in this order.
STEPS = {
    "ids": lambda engine: (engine.rag.components.planner, "missing"),
    "registration": lambda engine: (engine.rag.components.parser.registry, "add"),
    "forward": lambda engine: (engine.rag.model.base_model, "forward"),
    "model check": lambda engine: (engine.rag.components.background_encoder, "still_valid"),
}


@pytest.mark.parametrize("what", ["texts", "namespace"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", list(STEPS))
def test_forget_while_texts_are_encoded(make, monkeypatch, step, after, what):
    engine = make()
    gone, forget = forget_of(engine, what)
    meanwhile = Meanwhile(forget, wait=step != "registration")  # it waits for texts being registered
    around(monkeypatch, *STEPS[step](engine), meanwhile, after)
    ids = engine.rag.encode([GONE, KEPT])
    assert meanwhile.finish()
    assert ids == [next(iter(engine.chunk_ids([text]))) for text in (GONE, KEPT)]
    assert engine.rag.flush(WAIT)
    assert engine.left(gone) == []
    if what != "ids":
        assert not engine.recognised(GONE)
    if what != "namespace":  # nothing else goes with it
        assert engine.left(engine.chunk_ids([KEPT])) == ["host", "disk"]
        assert engine.recognised(KEPT)
    assert engine.reused(GONE) == 0


@pytest.mark.parametrize("step", ["ids", "forward", "model check"])
def test_forget_of_a_chunk_that_others_are_encoded_behind(make, monkeypatch, step):
    engine = make(encoder="similar:2", neighbours=PrecedingChunks([[GONE, KEPT, THIRD]]))
    gone, forget = forget_of(engine, "texts")
    meanwhile = Meanwhile(forget)
    around(monkeypatch, *STEPS[step](engine), meanwhile, after=True)
    engine.rag.encode([KEPT, THIRD, FOURTH], system=BEFORE)
    assert meanwhile.finish()
    assert engine.left(gone) == []
    assert engine.left(engine.chunk_ids([FOURTH])) == ["host", "disk"]
    # Nor is it a neighbour in what is encoded from now on.
    engine.rag.encode([KEPT, THIRD], system=BEFORE)
    assert engine.left(gone) == []
    assert engine.left(engine.chunk_ids([THIRD])) == ["host", "disk"]


@pytest.mark.parametrize("call", ["register", "encode", "prefetch"])
@pytest.mark.parametrize("what", ["texts", "namespace"])
def test_forget_while_texts_are_being_given(make, call, what):
    engine = make()
    gone, forget = forget_of(engine, what)

    def read():
        yield GONE
        forget()
        yield KEPT

    getattr(engine.rag, call)(read())
    assert engine.rag.flush(WAIT)
    assert not engine.recognised(GONE)
    assert engine.recognised(KEPT) == (call != "prefetch" and what == "texts")
    assert engine.left(gone) == []
    notes = engine.rag.link(f"{BEFORE}{GONE.upper()}").report.notes
    assert not any("retrieved" in note for note in notes)  # nor is it named as retrieved


def generated(engine, **options):
    return engine.rag.generate(MARKED, **ASKED, **options)


REQUESTS = {
    "generate": generated,
    "batch": lambda engine: engine.rag.generate_batch([MARKED, MARKED], **ASKED),
    "stream": lambda engine: list(engine.rag.stream(MARKED, **ASKED)),
    "link": lambda engine: engine.rag.link(MARKED),
}


@pytest.mark.parametrize(
    ("request_", "encoder", "grade", "cold", "what"),
    soaked(
        [
            (name, "standalone", grade, cold, what)
            for name, grade in itertools.product(REQUESTS, GRADES)
            for cold, what in itertools.product(("now", "background"), ("texts", "namespace"))
        ],
        *((name, "standalone", "linked", "background", "namespace") for name in REQUESTS),
        *((name, "standalone", "prefix", "now", "texts") for name in ("generate", "batch", "link")),
    )
    + [
        ("generate", encoder, "linked", cold, "texts")
        for encoder, cold in itertools.product(("in-prompt", "system", "similar:1"), ("now", "background"))
    ],
)
def test_forget_during_a_request(make, monkeypatch, request_, cold, what, encoder, grade):
    near = {"neighbours": PrecedingChunks([[GONE, KEPT]])} if encoder == "similar:1" else {}
    engine = make(cold=cold, encoder=encoder, shadow=1.0, grade=grade, **near)
    gone, forget = forget_of(engine, what)
    meanwhile = Meanwhile(forget)
    around(monkeypatch, engine.rag.model.base_model, "forward", meanwhile, after=True)
    REQUESTS[request_](engine)
    assert engine.rag.flush(WAIT)
    assert meanwhile.finish()
    assert engine.left(gone) == []


@pytest.mark.parametrize("grade", GRADES)
@pytest.mark.parametrize("what", ["texts", "ids", "namespace"])
def test_forget_while_the_tree_takes_a_request_in(make, monkeypatch, what, grade):
    engine = make(cold="background", policy="prefix", grade=grade)
    gone, forget = forget_of(engine, what)
    meanwhile = Meanwhile(forget, wait=False)  # it waits for the tree
    around(monkeypatch, engine.tree, "insert", meanwhile, after=False)
    generated(engine)
    assert engine.rag.flush(WAIT)
    assert meanwhile.finish()
    assert engine.left(gone) == []


@pytest.mark.parametrize("what", ["texts", "ids", "namespace"])
def test_forget_while_entries_are_prefetched(make, monkeypatch, what):
    engine = make(cold="never")
    gone, forget = forget_of(engine, what)
    engine.rag.encode([GONE, KEPT])
    engine.host.forget(SPACE)
    meanwhile = Meanwhile(forget)
    around(monkeypatch, engine.disk, "open", meanwhile, after=True)
    engine.rag.prefetch([GONE, KEPT])
    assert engine.rag.flush(WAIT)
    assert meanwhile.finish()
    assert engine.left(gone) == []
    assert engine.reused(GONE) == 0


class Race:
    """One kind of work and a forget, which the work's ``at``-th step releases."""

    def __init__(self, engine, seed):
        self.random = random.Random(seed)
        self.engine, self.namespace = engine, f"tenant-{seed}"
        self.texts = self.random.sample(TEXTS, 3)
        self.gone = self.random.sample(TEXTS, self.random.choice((1, 1, 2)))
        self.what = self.random.choice(("texts", "texts", "ids", "namespace"))
        self.kind = self.random.choice(("encode", "encode", "generate", "stream", "prefetch", "link"))
        self.meanwhile = Meanwhile(self.forget, self.random.randint(1, 12), self.random.random() < 0.5)

    def __str__(self):
        return f"{self.namespace}: {self.kind}, forget by {self.what} at step {self.meanwhile.at}"

    @property
    def ids(self):
        return None if self.what == "namespace" else self.engine.chunk_ids(self.gone, self.namespace)

    def forget(self):
        calls = {"texts": {"texts": self.gone}, "ids": {"ids": self.ids}, "namespace": {}}
        self.engine.rag.forget(**calls[self.what], namespace=self.namespace)

    def prepare(self):
        """Have some of it in the tiers before."""
        if self.kind == "prefetch" or self.random.random() < 0.3:
            self.engine.rag.encode(self.texts, namespace=self.namespace, system=BEFORE)
            self.engine.host.forget(self.namespace)
            if self.engine.rag.grade == "prefix":
                self.engine.rag.generate(prompt_of(*self.texts), namespace=self.namespace, **ASKED)
        else:
            self.engine.rag.register(self.texts, namespace=self.namespace)

    def work(self):
        rag, prompt = self.engine.rag, prompt_of(*self.texts)
        if self.kind == "encode":
            rag.encode(self.texts, namespace=self.namespace, system=BEFORE)
        elif self.kind == "prefetch":
            rag.prefetch(self.texts, namespace=self.namespace)
            assert rag.flush(WAIT)
        elif self.kind == "link":
            rag.link(prompt, namespace=self.namespace)
        elif self.kind == "stream":
            list(rag.stream(prompt, namespace=self.namespace, **ASKED))
        else:
            rag.generate(prompt, namespace=self.namespace, **ASKED)

    def check(self):
        """Nothing of it is left, and nothing is reused."""
        assert self.engine.rag.flush(WAIT)
        if not self.meanwhile.finish():
            self.forget()  # the work had fewer steps: what was begun before is still under way, perhaps
            assert self.engine.rag.flush(WAIT)
        assert self.engine.left(self.ids, self.namespace) == [], str(self)
        for text in self.gone:
            if self.what != "ids":
                assert not self.engine.recognised(text, self.namespace), str(self)
            assert self.engine.reused(text, self.namespace) == 0, str(self)
        assert self.engine.rag.flush(WAIT)
        self.engine.rag.forget(namespace=self.namespace)


def race(make, monkeypatch, seeds, **options):
    """Count how many forgets came in the middle of the work."""
    engine = make(**options)
    now: list[Race] = []

    def step():
        if now:
            now[0].meanwhile()

    stock = engine.rag.components
    for owner, name in (
        (engine.rag.components.planner, "missing"),
        (engine.rag.components.parser, "parse"),
        (engine.rag.components.planner, "prepare"),
        (engine.rag.components.planner, "plan"),
        (engine.rag.model.base_model, "forward"),
        (engine.host, "get"),
        (engine.disk, "open"),
        (engine.tree, "match"),
        (stock.planner, "unchanged"),
        (stock.background_encoder, "still_valid"),
    ):
        around(monkeypatch, owner, name, step, after=False)
        around(monkeypatch, owner, name, step, after=True)
    raced = 0
    for seed in seeds:
        trial = Race(engine, seed)
        trial.prepare()
        now.append(trial)
        trial.work()
        now.clear()
        raced += trial.meanwhile.calls >= trial.meanwhile.at
        trial.check()
    return raced


ENGINES = {
    "linked": (
        {"cold": "now"},
        {"cold": "background", "policy": "prefix", "tree_bytes": 20_000},
        {"cold": "background", "encoder": "system", "policy": "lego:4"},
        {"cold": "now", "encoder": "in-prompt", "policy": "reuse"},
    ),
    "prefix": (
        {"cold": "now", "grade": "prefix"},
        {"cold": "background", "grade": "prefix", "tree_bytes": 100_000},
        {"cold": "background", "grade": "prefix", "tree_bytes": 0},
    ),
}


def engines(make, monkeypatch, trials, grade):
    raced, share = 0, trials // len(ENGINES[grade])
    for number, options in enumerate(ENGINES[grade]):
        with monkeypatch.context() as patch:
            raced += race(make, patch, range(number * share, (number + 1) * share), **options)
    return raced


@pytest.mark.parametrize(("grade", "trials"), [("linked", 20), ("prefix", 9)])
def test_forgets_at_random(make, monkeypatch, grade, trials):
    assert engines(make, monkeypatch, trials, grade) > trials / 2


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("grade", "trials"), [("linked", 1000), ("prefix", 1002)])
def test_a_thousand_forgets_at_random(make, monkeypatch, grade, trials):
    raced = engines(make, monkeypatch, trials, grade)
    figures("forgets", grade=grade, trials=trials, raced=raced)
    assert raced > trials / 2
