"""With ``deterministic=True`` an answer depends on its prompt alone, whatever the engine did before."""

import functools
import random

import pytest
import torch

from engine_kit import FOLDER
from ragcachekit import Chunk, LoadConfig, ModelNotSupported, Prompt, RagCache, StoreConfig, Text, TreeConfig
from snapshots_kit import hybrid_speaker
from soak_kit import soaked
from speaking import ONE, THREE, TWO, byte_level, speaker
from tokenizer_kit import tokenizer_of

TEXTS = [ONE, TWO, THREE, "Where does the river Tiber flow? The answer is in Rome, the town of Rome."]
BEFORE, OTHER = "Answer from the context.\n\nContext:\n", "Answer the question:\n"
QUESTION = "\nWhere does the river flow?"
ENTRY = 25_000  # bytes of an entry, about


def text_prompt(*texts, before=BEFORE):
    return before + "\n".join(texts) + QUESTION


def marked(*texts, before=BEFORE):
    return Prompt([Text(before), *(part for text in texts for part in (Chunk(text), Text("\n")))])


PROMPTS = [
    text_prompt(*TEXTS[:3]),
    text_prompt(TEXTS[2], TEXTS[0]),
    text_prompt(TEXTS[3], TEXTS[2], before=OTHER),
    text_prompt(TEXTS[1], before=OTHER),
    text_prompt(" ".join(TEXTS[1:])),  # a space joins the first word: the chunks are there in part
    marked(*TEXTS[1:]),
    marked(TEXTS[0], TEXTS[3], TEXTS[0]),
    [{"role": "user", "content": text_prompt(*TEXTS[::-1])}],
]
POLICIES = ["auto", "reuse", "lego:4", "deep:0.2", "cacheblend:0.3", "impact:0.2", "prefix", "lego0"]


@functools.cache
def model():
    return speaker(vocab_size=len(tokenizer_of("llama3")))


def engine(store=None, **options):
    options = {"deterministic": True, **options}
    rag = RagCache(model(), tokenizer_of("llama3"), cache_dir=FOLDER.name, store=store, **options)
    rag.register(TEXTS)
    return rag


def asked(number, policy, sampled):
    return {"policy": policy, "max_new_tokens": 6, **({"do_sample": True, "seed": number} if sampled else {})}


@functools.cache
def keeps_nothing():
    return engine(StoreConfig(host_bytes=0), policy="reuse")


@functools.cache
def alone(number, policy, sampled=False):
    """The answer of an engine that has nothing cached."""
    return keeps_nothing().generate(PROMPTS[number], **asked(number, policy, sampled)).token_ids


def ordinary(store):
    """An engine without the option fills the store's folder."""
    with engine(store, deterministic=False, encoder="system", policy="reuse", cold="now") as rag:
        rag.encode(TEXTS, system=BEFORE)
        rag.generate(PROMPTS[0], max_new_tokens=1)


class History:
    """Random steps; asserts after each that asks something."""

    def __init__(self, seed, folder):
        self.rng, self.folder, self.rag = random.Random(seed), folder, None
        self.restart()

    def restart(self):
        """Another process on the same disk, with other budgets."""
        if self.rag is not None:
            self.rag.close()
        host, disk = self.rng.choice([0, 2 * ENTRY, 1 << 26]), self.rng.choice([3 * ENTRY, 1 << 26])
        store = StoreConfig(host_bytes=host, disk_path=self.folder, disk_bytes=disk)
        self.rag = engine(store, cold=self.rng.choice(["background", "now", "never"]))

    def others(self):
        ordinary(StoreConfig(disk_path=self.folder))

    def ask(self):
        number, policy, sampled = self._drawn()
        answer = self.rag.generate(PROMPTS[number], **asked(number, policy, sampled))
        assert answer.token_ids == alone(number, policy, sampled), (number, policy, str(answer.report))
        assert answer.report.link.fallback is None

    def batch(self):
        drawn = [self._drawn() for _ in range(4)]
        expected = [alone(*one) for one in drawn]  # before, as engines share torch's random numbers
        requests = [self.rag.submit(PROMPTS[one[0]], wait=True, **asked(*one)) for one in drawn]
        assert [request.result().token_ids for request in requests] == expected, drawn

    def encode(self):
        texts = self.rng.sample(TEXTS, self.rng.randint(1, len(TEXTS)))
        self.rag.encode(texts, system=self.rng.choice([BEFORE, OTHER]))

    def forget(self):
        self.rag.forget(**self.rng.choice([{"texts": self.rng.sample(TEXTS, 2)}, {}]))
        self.rag.register(TEXTS)

    def _drawn(self):
        return self.rng.randrange(len(PROMPTS)), self.rng.choice(POLICIES), self.rng.random() < 0.2

    def run(self, steps):
        kinds = (self.ask, self.batch, self.encode, self.forget, self.restart, self.others)
        try:
            for step in self.rng.choices(kinds, (5, 2, 1, 1, 1, 0.5), k=steps):
                step()
        finally:
            self.rag.close()


@pytest.mark.parametrize("seed", soaked((*range(20), *range(1000, 1200)), *range(4)))
def test_the_same_prompt_gives_the_same_tokens(seed, tmp_path):
    History(seed, tmp_path).run(8 if seed < 20 else 20)


def bits(rag):
    return [t.clone() for layer in rag.link(PROMPTS[0]).cache.layers for t in (layer.keys, layer.values)]


def test_not_one_bit_of_the_linked_rows_changes(tmp_path):
    store = StoreConfig(host_bytes=0, disk_path=tmp_path)
    ordinary(store)
    with engine(store) as cold:
        first, again = bits(cold), bits(cold)
    with engine() as warm:
        for text in TEXTS:
            warm.encode([text], system=BEFORE)
        assert all(map(torch.equal, first, bits(warm)))
    assert all(map(torch.equal, first, again))


def test_without_it_answers_follow_what_is_cached():
    with engine(deterministic=False, policy="reuse", encoder="system", cold="now") as rag:
        asked = [[rag.generate(prompt, max_new_tokens=12).token_ids for _ in range(2)] for prompt in PROMPTS]
    assert any(first != again for first, again in asked)


def test_what_was_encoded_for_a_prompt_does_not_count_as_reused():
    with engine(policy="reuse") as rag:
        first, second = (rag.generate(PROMPTS[0], max_new_tokens=1).report.link for _ in range(2))
    assert (first.reused_tokens, {use.source for use in first.uses}) == (0, {"encoded"})
    assert {use.source for use in second.uses} == {"host"}
    assert second.reused_tokens > second.prompt_tokens / 2


REFUSED = {
    "rules out tree=": {"tree": TreeConfig(1 << 20)},
    "rules out shadow=": {"shadow": 0.1},
    "rules out quantise=": {"store": StoreConfig(quantise={"host": "int8"})},
    "needs the encoder 'system'": {"encoder": "average:2"},
    "under 'in-prompt'": {"encoder": "in-prompt"},
    "follows calibrations": {"policy": "budget:0.1"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_depends_on_other_prompts_is_refused(message):
    with pytest.raises(ValueError, match=message):
        engine(**REFUSED[message])


def test_auto_is_fixed_and_unlinked_models_are_refused():
    with engine(load=LoadConfig("auto")) as rag:
        assert (rag.policy, rag.encoder) == ("sensitive:0.1", "system")
        with pytest.raises(ValueError, match="nothing to choose"):
            rag.tune()
    with pytest.raises(ModelNotSupported, match="deterministic=True needs"):
        RagCache(hybrid_speaker(), byte_level(), cache_dir=FOLDER.name, deterministic=True)
