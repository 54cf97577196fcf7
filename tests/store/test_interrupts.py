"""KeyboardInterrupt at any moment of a load, a read or a guarded call: it comes through alone."""

import json
import threading
from pathlib import Path

from ragcachekit.threads import Condition

HERE = Path(__file__).parent


def test_nothing_is_left_locked_open_or_dead(tmp_path, said_by):
    """In a process of its own: signals go to its main thread, and what it leaves locked stays so."""
    found = json.loads(said_by(HERE / "interrupted_loads.py", tmp_path / "kv", 1, 800, seconds=250))
    assert found.pop("interrupts") > 100
    assert found == {"others": {}, "descriptors": 0, "dead threads": 0}


def test_a_condition_wakes_all_who_wait_and_times_out():
    condition, seen = Condition(), list[int]()
    waiting = threading.Semaphore(0)

    def wait(number):
        def there():
            waiting.release()
            return len(seen) == 1

        assert condition.wait_for(there, 60.0)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        waiting.acquire()
    with condition:
        seen.append(1)
        condition.notify_all()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    assert not condition.wait_for(lambda: False, 0.0)
    assert condition.wait_for(lambda: True, 0.0)
    with condition:
        condition.notify_all()  # also for those who have gone
