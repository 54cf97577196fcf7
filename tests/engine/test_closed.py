"""A RagCache that was closed says so; closing twice, or during an answer, harms nobody."""

import os

import pytest

from ragcachekit import StoreConfig, TreeConfig
from ragcachekit.errors import Closed
from speaking import ONE

PROMPT = f"Answer from the context.\n{ONE}\nWhere does the river flow?"
ASKED = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1}


@pytest.fixture
def rag(opened, tmp_path):
    store, tree = StoreConfig(disk_path=tmp_path / "kv"), TreeConfig(disk_bytes=1 << 20)
    rag = opened(store=store, tree=tree, shadow=0.5)
    rag.encode([ONE])
    return rag


CALLS = {
    "register": lambda rag: rag.register([ONE]),
    "prefetch": lambda rag: rag.prefetch([ONE]),
    "encode": lambda rag: rag.encode([ONE]),
    "forget": lambda rag: rag.forget(texts=[ONE]),
    "generate": lambda rag: rag.generate(PROMPT, **ASKED),
    "generate_batch": lambda rag: rag.generate_batch([PROMPT], **ASKED),
    "submit": lambda rag: rag.submit(PROMPT, **ASKED),
    "no prompts": lambda rag: rag.generate_batch([]),
    "stream": lambda rag: rag.stream(PROMPT, **ASKED),
    "link": lambda rag: rag.link(PROMPT),
    "tune": lambda rag: rag.tune([ONE]),
    "with": lambda rag: rag.__enter__(),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_use_after_close_is_refused(rag, call):
    rag.close()
    with pytest.raises(Closed, match=r"this RagCache is closed; make a new one"):
        CALLS[call](rag)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that it is asked for is the point here
def test_every_use_in_a_forked_child_is_refused(rag):
    stream = rag.stream(PROMPT, **{**ASKED, "max_new_tokens": 100})
    request = rag.submit(PROMPT, **ASKED)
    waits = (
        lambda _: next(stream),
        lambda _: stream.answer,
        lambda _: request.result(),
        lambda _: rag.queue.drain(),
    )
    child = os.fork()
    if not child:
        good = 0
        try:
            for call in (*CALLS.values(), *waits):
                try:
                    call(rag)
                except Closed as refused:
                    good += "open it again after the fork" in str(refused)
            rag.close()
        finally:  # whatever is raised: the child must not go on as a test run
            os._exit(0 if good == len(CALLS) + len(waits) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(stream.answer.token_ids) == 100
    assert request.result().token_ids


def test_closing_twice_and_what_can_still_be_read(rag):
    rag.generate(PROMPT, **ASKED)
    for _ in range(2):
        rag.close()
    assert rag.flush(timeout=5)
    assert rag.shadow_report().requests == 1
    assert {record.entries for record in rag.stats()} == {0}
    assert rag.count_tokens("a") == 1


def test_an_answer_under_way_is_given_whole(rag):
    want = rag.generate(PROMPT, **ASKED).text
    with rag.stream(PROMPT, **ASKED) as stream:
        first = next(stream)
        rag.close()
        assert first + "".join(stream) == want
        assert stream.answer.report.finish_reason == "length"
