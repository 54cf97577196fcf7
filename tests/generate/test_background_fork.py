"""Jobs behind answers in a forked process."""

from __future__ import annotations

import subprocess
import sys

FORK = """
import os, threading
from ragcachekit.generate.background import Background
reached, gate, done = threading.Event(), threading.Event(), []
def work(job):
    if job == "waits":
        reached.set()
        assert gate.wait(60)
    done.append(job)
background = Background(work, 4, "test")
background.submit("waits")
background.submit("the parent's")
assert reached.wait(60)
child = os.fork()
if not child:
    assert background.flush(0)
    assert background.submit("the child's")
    assert background.flush(60)
    background.close()
    os._exit(7 if done == ["the child's"] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
gate.set()
assert background.flush(60)
background.close()
assert done == ["waits", "the parent's"]
"""


def test_the_child_does_its_own_jobs_and_waits_for_none_of_the_parents():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
