"""The demo's questions: written by hand, and answered by the documentation of this Python."""

import pytest

from benchmarks.demo import manual
from benchmarks.demo.corpus import MAX_FALSE_HITS, Question, calibrated, calibration_questions, questions
from ragcachekit.commands.embedding import MiniLM

ALL = questions()


@pytest.fixture(scope="module")
def pages():
    return dict(manual.pages(*sorted({question.module for question in ALL})))


def test_most_answers_stand_in_the_documentation(pages):
    assert all(question.answer in question.sentence for question in ALL)
    found = [q for q in ALL if q.module in pages and q.evidence([pages[q.module]])]
    assert len(found) >= 24


def test_evidence_is_every_chunk_with_the_sentence():
    question = Question("m", "an answer is here", "answer", ("?",))
    texts = ["m\nan  answer\n   is here now", "an answer", "nothing", "so an answer is here"]
    assert question.evidence(texts) == {0, 3}
    assert question.evidence(["an answer"]) == frozenset()


def test_the_tolerance_is_calibrated_on_other_questions():
    others = calibration_questions()
    asked = {text for question in ALL for text in question.wordings}
    assert not asked & {text for pair in others for text in pair}
    found = calibrated(others, MiniLM())
    assert found.different_pairs == 2 * found.same_pairs == 2 * len(others)
    assert found.false_hit_rate <= MAX_FALSE_HITS
    assert 0 < found.tolerance < 0.2
