"""Compiles the launches that move KV for Hopper, without a GPU; run by test_compiled_moves.py."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from compile_scores import Recorded, findings

from ragcachekit_kernels.placement import assembly, scatter, storing
from ragcachekit_kernels.placement.planes import ChunkTensors, Layout, Place, Plane
from ragcachekit_kernels.rows import DeviceRows, KVTable

KERNELS = {
    "_move_kernel": assembly,
    "_quantise_kernel": storing,
    "_scatter_kernel": scatter,
    "_scatter_at_kernel": scatter,
}


def layout(stored=torch.bfloat16, heads=8, dim=128, pairs=64, offset=0, interleaved=False, skip=(3,)):
    """Keys and values of one layer and one chunk."""
    tensors = tuple(torch.zeros(heads, 64, dim).to(stored) for _ in range(2))
    scales = (torch.zeros(heads, 1, dim), torch.zeros(heads, 64, 1))
    chunk = ChunkTensors(tensors, scales if stored.itemsize == 1 else ())
    kv = [torch.empty(heads, 128, dim, dtype=torch.bfloat16) for _ in range(2)]
    planes = [Plane(kv[0], 0 if pairs else None, interleaved, offset), Plane(kv[1])]
    return Layout(planes, [Place(5, 60)], [chunk], [(torch.zeros(128, max(pairs, 1)),) * 2], skip)


def into(**kind):
    assembly.TritonAssembly(layout(**kind)).run()


def out(**kind):
    storing.disassemble(layout(**kind, skip=()))


def rows(through_table):
    new = torch.empty(64, 8, 128, dtype=torch.bfloat16).transpose(0, 1)
    at = DeviceRows(torch.zeros(64, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    if through_table:
        scatter.scatter_at(new, new, KVTable(torch.zeros(4, 4, dtype=torch.int64), new.dtype), 2, at)
    else:
        kv = torch.empty(8, 1024, 128, dtype=torch.bfloat16)
        scatter.scatter(new, new, kv, kv, at)


CASES = {
    "assembly": into,
    "assembly, int8": lambda: into(stored=torch.int8),
    "assembly, fp8": lambda: into(stored=torch.float8_e4m3fn),
    "assembly, neighbours": lambda: into(interleaved=True),
    "assembly, half of it": lambda: into(pairs=32),
    "assembly, a quarter, neighbours": lambda: into(pairs=16, interleaved=True, offset=96),
    "assembly, 64 dimensions": lambda: into(heads=2, dim=64, pairs=32),
    "assembly, 256 dimensions": lambda: into(heads=4, dim=256, pairs=128),
    "assembly, 96 dimensions": lambda: into(heads=32, dim=96, pairs=48),
    "assembly, latent": lambda: into(heads=1, dim=512, pairs=0),
    "storing": out,
    "storing, int8": lambda: out(stored=torch.int8),
    "storing, fp8": lambda: out(stored=torch.float8_e4m3fn),
    "storing, int8, neighbours": lambda: out(stored=torch.int8, interleaved=True),
    "storing, int8, half of it": lambda: out(stored=torch.int8, pairs=32),
    "scatter": lambda: rows(False),
    "scatter, table": lambda: rows(True),
}


def widths(made):
    """How many accesses to rows there are, and how many of them are 16 bytes wide."""
    lines = re.findall(r"(?:ld|st)\.global\S*", made.asm["ptx"])
    reads = [line for line in lines if "evict_first" in line]
    writes = [line for line in lines if line.startswith("st.")]
    return {
        "reads": len(reads),
        "wide_reads": sum(".v4." in line for line in reads),
        "writes": len(writes),
        "wide_writes": sum(".v4." in line for line in writes),
    }


if __name__ == "__main__":
    folder, found = Path(sys.argv[1]), {}
    for case in sys.argv[2:]:
        stand_ins = {name: Recorded(getattr(module, name)) for name, module in KERNELS.items()}
        for name, module in KERNELS.items():
            setattr(module, name, stand_ins[name])
        CASES[case]()
        for name, module in KERNELS.items():
            setattr(module, name, stand_ins[name].kernel)
        (made,) = [made for one in stand_ins.values() for made in one.made]
        found[case] = findings(made, folder) | widths(made)
    sys.stdout.write(json.dumps(found))
