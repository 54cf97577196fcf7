"""``cached_first``: the order of texts in which more of their prompt is an exact cached beginning."""

import threading
from itertools import permutations

import pytest
import torch
import transformers as tf

from ragcachekit import RagCache, StoreConfig, TreeConfig
from ragcachekit.plan.planner import WINDOW
from speaking import ONE, THREE, TWO, byte_level

FOUR = "Madrid is the capital of Spain. The river Manzanares flows in Madrid, as all know."
ASKED = {"max_new_tokens": 2, "do_sample": False}


@pytest.fixture
def rag(opened):
    return opened(policy="prefix", cold="now", tree=TreeConfig(host_bytes=1 << 26))


def messages(texts, question="Where does the river flow?", system="Answer from the context.", before=""):
    context = "\n\n".join(before + text for text in texts)
    return [
        {"role": "system", "content": f"{system}\n\n{context}"},
        {"role": "user", "content": question},
    ]


def ask(rag, texts, namespace="default", **kinds):
    rag.register(texts, namespace=namespace)
    return rag.generate(messages(texts, **kinds), namespace=namespace, **ASKED).report.link


def ordered(rag, texts, **options):
    return [texts[number] for number in rag.cached_first(texts, **options)]


class TestOrder:
    def test_texts_of_the_longest_cached_beginning_come_first(self, rag):
        ask(rag, [ONE, TWO, THREE])
        ask(rag, [TWO, FOUR])
        assert ordered(rag, [THREE, TWO, ONE]) == [ONE, TWO, THREE]
        assert ordered(rag, [FOUR, TWO, ONE]) in ([ONE, TWO, FOUR], [TWO, FOUR, ONE])
        assert ordered(rag, [FOUR, THREE, ONE]) == [ONE, FOUR, THREE], (
            "the chain ends at a text not asked for"
        )
        assert ordered(rag, [FOUR, THREE]) == [FOUR, THREE], "neither begins a prompt"
        assert rag.cached_first([FOUR, TWO]) == [1, 0]

    def test_a_prompt_in_that_order_reuses_the_whole_chain_exactly(self, rag):
        first = ask(rag, [ONE, TWO, THREE])
        as_found = [THREE, TWO, ONE]
        link = ask(rag, ordered(rag, as_found), question="Which capital?")
        assert [use.source for use in link.chunks] == ["tree:host"] * 3
        assert link.tree_tokens > 0.6 * first.prompt_tokens
        assert ask(rag, as_found).tree_tokens < link.tree_tokens / 2

    def test_the_longest_chain_in_tokens_wins_not_the_first_step(self, rag):
        ask(rag, [ONE, FOUR])
        ask(rag, [TWO, THREE, ONE])
        assert ordered(rag, [ONE, TWO, THREE]) == [TWO, THREE, ONE]

    def test_every_permutation_of_what_was_cached_gives_the_cached_order(self, rag):
        texts = [FOUR, ONE, THREE, TWO]
        ask(rag, texts)
        assert all(ordered(rag, list(given)) == texts for given in permutations(texts))

    def test_one_text_none_or_nothing_cached(self, rag):
        assert rag.cached_first([ONE]) == [0]
        assert rag.cached_first([]) == []
        assert rag.cached_first([ONE, TWO]) == [0, 1], "before any prompt"
        with pytest.raises(TypeError, match="texts must be a list"):
            rag.cached_first("Berlin")

    def test_without_a_tree_the_order_is_that_found(self, opened):
        rag = opened(policy="reuse", cold="now")
        ask(rag, [TWO, ONE])
        assert rag.cached_first([ONE, TWO]) == [0, 1]

    def test_duplicates_keep_their_number_and_are_used_once_each(self, rag):
        ask(rag, [ONE, ONE, TWO])
        assert rag.cached_first([TWO, ONE, ONE]) == [1, 2, 0]
        assert rag.cached_first([TWO, ONE]) == [1, 0]

    @pytest.mark.parametrize("given", ["  " + ONE, ONE + "\n\n", "\n" + ONE + "  "])
    def test_a_text_is_known_in_the_form_that_a_chain_gives_it(self, rag, given):
        rag.register([given, TWO])
        rag.generate(messages([given.strip(), TWO]), **ASKED)
        assert rag.cached_first([TWO, given]) == [1, 0]

    @pytest.mark.parametrize(
        "before", ["", "Source: a page of the guide.\n", "Source: " + "the town " * 8 + "\n"]
    )
    def test_text_between_chunks_does_not_matter(self, rag, before):
        """Metadata of a custom format: none, a line, and more than a block of the tree."""
        ask(rag, [ONE, TWO, THREE], before=before)
        assert ordered(rag, [THREE, TWO, ONE]) == [ONE, TWO, THREE]
        link = ask(rag, [ONE, TWO, THREE], before=before, question="Which capital?")
        assert [use.source for use in link.chunks] == ["tree:host"] * 3

    @pytest.mark.parametrize("system", ["", "Answer.", "Answer from the context. " * 12])
    def test_system_texts_of_all_lengths(self, rag, system):
        ask(rag, [ONE, TWO], system=system)
        assert ordered(rag, [TWO, ONE]) == [ONE, TWO]

    def test_beginnings_with_the_last_system_text_come_before_equal_ones_with_others(self, rag):
        brief = "You are a guide to the capital of a country; you answer in one word."
        ask(rag, [ONE, TWO])
        ask(rag, [TWO, ONE], system=brief)
        assert ordered(rag, [ONE, TWO]) == [TWO, ONE]
        ask(rag, [FOUR, THREE])
        assert ordered(rag, [TWO, ONE]) == [ONE, TWO]

    def test_system_texts_that_were_long_ago_do_not_count(self, rag):
        ask(rag, [ONE, TWO, THREE], system="You are a guide to the capital of a country.")
        for number in range(WINDOW + 1):
            ask(rag, [TWO, FOUR], question=f"Where does river {number} flow?")
        assert ordered(rag, [ONE, THREE, TWO]) == [TWO, ONE, THREE]

    @pytest.mark.parametrize("size", [1, 8])
    def test_metadata_of_the_first_chunk_is_part_of_the_first_text(self, rag, size):
        """It differs from prompt to prompt, so that only the text before it is the same."""
        place = {ONE: "Berlin ", TWO: "Paris ", THREE: "Rome ", FOUR: "Madrid "}

        def with_metadata(texts, question="Where?"):
            rag.register(texts)
            context = "\n\n".join(f"Source: {place[text] * size}\n{text}" for text in texts)
            return rag.generate(messages([context], question), **ASKED).report.link

        with_metadata([ONE, TWO, THREE])
        with_metadata([FOUR, ONE])
        with_metadata([THREE, TWO])
        assert ordered(rag, [TWO, ONE, THREE]) == [ONE, TWO, THREE]
        link = with_metadata([ONE, TWO, THREE], "Which capital?")
        assert [use.source for use in link.chunks] == ["tree:host"] * 3


@pytest.mark.parametrize("family", [tf.GPT2Config, tf.Mamba2Config])
def test_models_whose_chunks_cannot_be_linked(family, tmp_path):
    """Exact beginnings are all that they reuse."""
    sizes = {
        tf.GPT2Config: {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
        tf.Mamba2Config: {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}
        | {"num_hidden_layers": 2, "chunk_size": 16},
    }
    tokenizer = byte_level()
    torch.manual_seed(0)
    config = family(
        vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes[family]
    )
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    with RagCache(model, tokenizer, cache_dir=tmp_path) as rag:
        assert rag.grade == "prefix"
        first = ask(rag, [ONE, TWO, THREE])
        rag.flush()
        order = ordered(rag, [THREE, TWO, ONE])
        assert order == [ONE, TWO, THREE]
        link = ask(rag, order, question="Which capital?")
        assert link.exact_tokens > 0.6 * first.prompt_tokens


class TestIsolation:
    def test_namespaces_are_never_mixed(self, rag):
        ask(rag, [ONE, TWO], namespace="a")
        ask(rag, [THREE, FOUR], namespace="b")
        assert rag.cached_first([TWO, ONE], namespace="a") == [1, 0]
        assert rag.cached_first([TWO, ONE], namespace="b") == [0, 1]
        assert rag.cached_first([TWO, ONE]) == [0, 1]

    def test_a_forgotten_text_is_no_longer_found(self, rag):
        ask(rag, [ONE, TWO, THREE])
        rag.forget(texts=[TWO])
        assert rag.cached_first([THREE, TWO, ONE]) == [2, 0, 1], "the beginning before it is still there"
        rag.forget(texts=[ONE])
        assert rag.cached_first([THREE, TWO, ONE]) == [0, 1, 2]
        ask(rag, [ONE, TWO])
        rag.forget()
        assert rag.cached_first([TWO, ONE]) == [0, 1]

    def test_forgets_of_another_engine_on_the_same_folder_are_followed(self, opened, tmp_path):
        both = [
            opened(
                policy="prefix",
                cold="now",
                tree=TreeConfig(host_bytes=1 << 26, disk_bytes=1 << 26),
                store=StoreConfig(disk_path=tmp_path / "kv"),
            )
            for _ in range(2)
        ]
        for rag in both:
            ask(rag, [ONE, TWO])
        both[1].forget(texts=[ONE])
        assert both[0].cached_first([TWO, ONE]) == [0, 1]

    def test_nothing_is_counted_loaded_or_evicted(self, rag):
        ask(rag, [ONE, TWO, THREE])
        before = rag.stats()
        for _ in range(20):
            rag.cached_first([THREE, ONE, TWO])
        assert rag.stats() == before

    def test_while_other_threads_ask_and_forget(self, rag):
        texts, ended, looks = [ONE, TWO, THREE, FOUR], threading.Event(), [0] * 3
        errors = []

        def look(who):
            try:
                while not ended.is_set():
                    assert sorted(rag.cached_first(texts)) == [0, 1, 2, 3]
                    looks[who] += 1
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=look, args=(who,)) for who in range(3)]
        for thread in threads:
            thread.start()
        try:
            for number in range(6):
                ask(rag, texts[number % 4 :] + texts[: number % 4])
                rag.forget(texts=[texts[number % 3]])
        finally:
            ended.set()
        for thread in threads:
            thread.join()
        assert errors == []
        assert min(looks) > 3
