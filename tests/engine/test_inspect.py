"""The prompt drawn by how its KV was had, and what an engine says of itself."""

import copy
import pickle
import re
from html import unescape

import pytest
from rich.console import Console

from engine_kit import checked
from ragcachekit import RagCache, StoreConfig
from speaking import byte_level, speaker

ONE = "Berlin is the capital of Germany. The river Spree flows in Berlin."
TWO = "Paris is the capital of France; the river Seine flows <in> Paris."
PROMPT = f"Answer from the context.\n{ONE}\n\n{TWO}\nWhere does the river flow?"
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def rag(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with RagCache(speaker(), byte_level(), cache_dir=folder, cold="now", policy="lego:4") as rag:
        rag.encode([ONE, TWO])
        rag.generate(MESSAGES, max_new_tokens=1)
        rag.generate(PROMPT, max_new_tokens=1)
        yield rag


class TestView:
    @pytest.mark.parametrize("policy", [None, "query:0.2", "full"])
    @pytest.mark.parametrize("prompt", [PROMPT, MESSAGES])
    def test_counts_are_those_of_the_report(self, rag, prompt, policy) -> None:
        view = rag.inspect(prompt, policy=policy)
        link = rag.link(prompt, policy=policy).report
        assert view.tokens == {
            "exact": link.exact_tokens,
            "approximate": link.approximate_tokens,
            "recomputed": link.recomputed_tokens,
            "computed": link.computed_tokens,
        }
        assert sum(view.tokens.values()) == link.prompt_tokens

    def test_the_texts_are_the_prompt(self, rag) -> None:
        view = rag.inspect(MESSAGES)
        whole = rag.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        assert "".join(piece.text for piece in view.pieces) == whole
        for number, text in ((1, ONE), (2, TWO)):
            assert "".join(piece.text for piece in view.pieces if piece.chunk == number) == text

    def test_html_is_escaped_and_complete(self, rag) -> None:
        markup = rag.inspect(PROMPT)._repr_html_()
        assert "<in>" not in markup
        shown = unescape(re.sub("<[^>]*>", "", markup))
        assert "[1 host]" in shown
        assert "flows <in> Paris." in shown

    def test_text_and_terminal(self, rag) -> None:
        view = rag.inspect(PROMPT)
        assert repr(ONE)[1:-1] in str(view)
        assert "4 recomputed" in str(view)
        assert len(repr(view)) < 150
        console = Console(force_terminal=True, color_system="truecolor")
        with console.capture() as captured:
            console.print(view)
        assert "\x1b[" in captured.get()
        assert "Spree" in captured.get()

    def test_nothing_is_stored_or_generated(self, tmp_path) -> None:
        with RagCache(
            speaker(), byte_level(), cache_dir=checked(tmp_path), cold="now", policy="lego:4"
        ) as rag:
            rag.register([ONE])
            view = rag.inspect(PROMPT)
            assert set(view.tokens.values()) == {0, view.report.prompt_tokens}
            assert rag.stats()[0].entries == 0
            assert rag.reports == ()


class TestRepr:
    def test_names_what_matters(self, rag) -> None:
        shown = repr(rag)
        for part in ("LlamaForCausalLM on cpu", "lego:4", "average:2", "'default'"[1:-1], "host", "entries"):
            assert part in shown
        assert len(shown) < 300
        assert "<table>" in rag._repr_html_()

    def test_of_a_closed_engine(self, tmp_path) -> None:
        rag = RagCache(
            speaker(), byte_level(), cache_dir=checked(tmp_path), store=StoreConfig(disk_path=tmp_path / "kv")
        )
        rag.close()
        assert "closed" in repr(rag)
        assert "closed" in rag._repr_html_()

    @pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
    def test_it_cannot_be_pickled_and_says_what_to_do(self, rag, way) -> None:
        with pytest.raises(TypeError, match="make one in each process"):
            way(rag)


class TestPlainTextOfAChatModel:
    def test_has_a_note_once(self, tmp_path) -> None:
        with RagCache(speaker(), byte_level(), cache_dir=checked(tmp_path), policy="full") as rag:
            ask = lambda prompt: " ".join(rag.generate(prompt, max_new_tokens=1).report.link.notes)  # noqa: E731
            assert "chat template" not in ask(MESSAGES)
            assert "chat template" not in ask("<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n")
            assert "was not applied: give messages" in ask("Where?")
            assert "chat template" not in ask("Where?")
