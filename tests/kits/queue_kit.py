"""A queue that is held while requests come, so that a test knows what waits."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ragcachekit import RagCache

LONG = 60.0


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@contextmanager
def held(rag: RagCache) -> Iterator[list[Any]]:
    """Let no turn begin inside the block; yields the requests whose turn came afterwards, in order."""
    runner, turns, go_on = rag.queue.runner, [], threading.Event()
    begin, has_room, step = runner.begin, runner.has_room, runner.step

    def begun(request: Any, *how: Any) -> bool:
        turns.append(request)
        return begin(request, *how)

    def stepped() -> list[Any]:
        go_on.wait(0.002)
        return step()

    runner.begin, runner.step = begun, stepped  # type: ignore[method-assign]
    runner.has_room = lambda _: False  # type: ignore[method-assign]
    try:
        yield turns
    finally:
        runner.has_room = has_room  # type: ignore[method-assign]
        go_on.set()


def fail_next(owner: Any, name: str, error: BaseException, times: int = 1) -> None:
    """Have a method raise ``error`` in its next ``times`` calls."""
    works, left = getattr(owner, name), [error] * times

    def fails(*args: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return works(*args, **options)

    setattr(owner, name, fails)
