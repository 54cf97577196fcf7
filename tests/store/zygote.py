"""Imports torch once, and forks a process for each line of JSON: a program, its arguments, its output."""

import json
import os
import runpy
import sys

import torch

torch.set_num_threads(1)  # a forked child has no copies of torch's worker threads


def work(program: str, arguments: list[str], out: str) -> None:
    for number, ending in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{out}.{ending}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        work(*json.loads(line))
        sys.exit()
    sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
    sys.stdout.flush()
