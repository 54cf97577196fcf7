"""What was opened before a fork raises at once in the child, whatever locks were held."""

import sys

import pytest

FORK = """
import os, sys, threading
from pathlib import Path
import pytest, torch
from loading_kit import Gate, SlowStore, start
from store_kit import contents, key_of, kv_of
from ragcachekit.errors import Closed
from ragcachekit.threads import BackgroundWorker
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.backends import FsspecStore
from ragcachekit.store.memory import HostStore
from ragcachekit.store.loader import Loader
from ragcachekit.store.tiered import TieredStore
from ragcachekit.threads import Condition
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree

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

host, disk = HostStore(1 << 20), DiskStore(folder / "kv", 1 << 20)
tiered = TieredStore([host, disk])
assert tiered.put(key_of(0), kv_of(0))
gate = Gate()
slow = SlowStore(gate)
slow.put(key_of(1), kv_of(1))
loader = Loader(slow)
kv = start(loader, key_of(1)).kv
assert gate.reached.wait(60)
go_on, done = threading.Event(), []
worker = BackgroundWorker()
jobs = worker.queue(lambda job: (go_on.wait(60), done.append(job)), 4)
assert jobs.add(1) and jobs.add(2)

bulk = FsspecStore((folder / "bulk").as_uri(), key=bytes(32), deadline=2.0)
tree = KnowledgeTree(host_bytes=1 << 20)
assert bulk.put(key_of(0), kv_of(0))

opened = (host, disk, tiered, loader, worker, bulk, tree)
held, over = threading.Event(), threading.Event()
all_locks = [lock for one in opened for lock in locks(one, {})]
assert len(all_locks) >= 8

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
        lambda: host.get(key_of(0)),
        lambda: disk.put(key_of(2), kv_of(2)),
        lambda: key_of(0) in tiered,
        lambda: tiered.forget("acme/docs"),
        lambda: jobs.add(3),
        lambda: worker.flush(),
        lambda: bulk.get(key_of(0)),
        lambda: tree.stats(),
    ):
        with pytest.raises(Closed, match="open it again after the fork"):
            call()
    with pytest.raises(Closed):
        loader.open(key_of(1))
    for one in (host, disk, tiered, worker, bulk, tree):
        one.close()
    again = DiskStore(folder / "kv", 1 << 20)
    assert contents(again.get(key_of(0)).kv) == contents(kv_of(0))
    again.close()
    sys.exit(7)  # with its exit handlers
over.set()
holder.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
gate.open()
go_on.set()
assert (kv.layer(1)[0] == kv_of(1).keys[1]).all()
assert worker.flush(60) and done == [1, 2]
assert contents(tiered.get(key_of(0)).kv) == contents(kv_of(0))
assert contents(bulk.get(key_of(0)).kv) == contents(kv_of(0))
for one in (loader, tiered, worker, bulk, tree):
    one.close()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_gets_a_clear_error_and_opens_anew(tmp_path, said_by):
    said_by(FORK, tmp_path)
