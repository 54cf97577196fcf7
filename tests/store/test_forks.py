"""What has threads and was opened before a fork raises at once in the child, whatever locks were held."""

import sys

import pytest

FORK = """
import os, sys, threading
from pathlib import Path
import pytest, torch
from store_kit import contents, key_of, kv_of
from ragcachekit.errors import Closed
from ragcachekit.threads import BackgroundWorker
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.backends import FsspecStore
from ragcachekit.threads import Condition

torch.set_num_threads(1)  # the threads of torch's pool do not exist in the child
folder = Path(sys.argv[1])

LOCKS = (Condition, type(threading.Lock()), type(threading.RLock()))

def locks(thing, seen):
    if id(thing) not in seen and isinstance(thing, LOCKS):
        seen[id(thing)] = thing
    elif id(thing) not in seen and type(thing).__module__.startswith("ragcachekit."):
        seen[id(thing)] = None
        for part in vars(thing).values():
            locks(part, seen)
    return [lock for lock in seen.values() if lock is not None]

disk = DiskStore(folder / "kv", 1 << 20)
assert disk.put(key_of(0), kv_of(0))
go_on, done = threading.Event(), []
worker = BackgroundWorker()
jobs = worker.queue(lambda job: (go_on.wait(60), done.append(job)), 4)
assert jobs.add(1) and jobs.add(2)

bulk = FsspecStore((folder / "bulk").as_uri(), key=bytes(32), deadline=2.0)
assert bulk.put(key_of(0), kv_of(0))

opened = (worker, bulk)
held, over = threading.Event(), threading.Event()
all_locks = [lock for one in opened for lock in locks(one, {})]
assert len(all_locks) >= 4

def hold():
    for lock in dict.fromkeys(all_locks):
        lock.acquire()
    held.set()
    over.wait(60)
    for lock in dict.fromkeys(all_locks):
        lock.release()

holder = threading.Thread(target=hold)
holder.start()
assert held.wait(60)
child = os.fork()
if not child:
    for call in (
        lambda: jobs.add(3),
        lambda: worker.flush(),
        lambda: bulk.get(key_of(0)),
    ):
        with pytest.raises(Closed, match="open it again after the fork"):
            call()
    for one in opened:
        one.close()
    again = DiskStore(folder / "kv", 1 << 20)
    assert contents(again.get(key_of(0)).kv) == contents(kv_of(0))
    again.close()
    sys.exit(7)  # with its exit handlers
over.set()
holder.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
go_on.set()
assert worker.flush(60) and done == [1, 2]
assert contents(disk.get(key_of(0)).kv) == contents(kv_of(0))
assert contents(bulk.get(key_of(0)).kv) == contents(kv_of(0))
for one in (*opened, disk):
    one.close()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_gets_a_clear_error_and_opens_anew(tmp_path, said_by):
    said_by(FORK, tmp_path)
