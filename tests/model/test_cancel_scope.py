"""CancelScope by itself: nesting, threads, what raises where, and what is put back."""

import asyncio
import threading
from contextvars import copy_context

import pytest

from ragcachekit import Cancelled, CancelScope, RagCacheError, to_thread
from ragcachekit.cancellation import raise_if_cancelled

LONG = 60.0


def cancelled() -> bool:
    try:
        raise_if_cancelled()
    except Cancelled:
        return True
    return False


def test_an_inner_scope_ends_with_those_around_it_and_not_the_other_way_round() -> None:
    with CancelScope() as outer:
        with CancelScope() as inner:
            inner.cancel()
            assert cancelled()
        assert not cancelled()
        outer.cancel()
        with CancelScope() as late:
            assert late.requested
            assert cancelled()


def test_an_event_cancels() -> None:
    event = threading.Event()
    with CancelScope(event) as scope:
        assert not cancelled()
        event.set()
        assert scope.requested
        assert cancelled()


def test_between_tokens_nothing_is_raised_between_layers() -> None:
    with CancelScope() as scope:
        scope.between_layers = False
        scope.cancel()
        assert scope.requested
        assert not cancelled()


def test_threads_are_inside_only_with_a_copy_of_the_context() -> None:
    found: list[bool] = []

    def look() -> None:
        found.append(cancelled())

    with CancelScope() as scope:
        scope.cancel()
        context = copy_context()
        for target in (look, lambda: context.run(look)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join(LONG)
    assert found == [False, True]


def test_run_gives_the_result_or_the_error_and_the_work_is_inside() -> None:
    with CancelScope() as outer:
        assert CancelScope().run(divmod, 7, 2) == (3, 1)
        assert not CancelScope().run(cancelled)
        with pytest.raises(ZeroDivisionError):
            CancelScope().run(divmod, 7, 0)
        outer.cancel()
        assert CancelScope().run(cancelled)


def test_it_is_no_exception_that_a_fallback_would_handle() -> None:
    assert not issubclass(Cancelled, Exception)
    assert not issubclass(Cancelled, RagCacheError)


async def test_to_thread_gives_the_result_and_cancels_with_its_task() -> None:
    assert await to_thread(divmod, 7, 2) == (3, 1)
    inside, left, found = threading.Event(), threading.Event(), []

    def work() -> None:
        inside.set()
        assert left.wait(LONG)
        found.append(cancelled())

    task = asyncio.ensure_future(to_thread(work))
    assert await asyncio.to_thread(inside.wait, LONG)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    left.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert found == [True]
