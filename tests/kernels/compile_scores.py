"""Compiles the launches that score keys for Hopper, without a GPU; run by test_compiled_scores.py.

Prints, as JSON, what ptxas made of each. Launches are those of the library: only their execution is replaced.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ragcachekit_kernels.options import AttentionOptions
from ragcachekit_kernels.rows import Rows, Spans
from ragcachekit_kernels.scores import column_scores, deviation

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
LAUNCH = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")


class Recorded:
    """Stands in for a kernel and compiles what it is launched with."""

    def __init__(self, kernel):
        self.kernel, self.made = kernel, []

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *values, **named):
        options = {name: named.pop(name) for name in LAUNCH if name in named}
        names = self.kernel.arg_names
        given = dict(zip(names, values, strict=False)) | named
        apart = {names[i] if isinstance(i, int) else i for i in self.kernel.do_not_specialize or ()}
        signature, constants, hints = {}, {}, {}
        for place, name in enumerate(names):
            value = given[name]
            if isinstance(value, torch.Tensor):
                signature[name], hints[(place,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
            elif name.isupper():
                signature[name], constants[(place,)] = "constexpr", value
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0 and name not in apart:
                    hints[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature=signature, constexprs=constants, attrs=hints)
        self.made.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


def findings(made, folder):
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])

    def told(tool, *arguments):
        command = [str(TOOLS / tool), *arguments, str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    usage = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", told("cuobjdump", "-res-usage"))
    code = told("nvdisasm")
    return {
        "registers": int(usage[1]),
        "stack": int(usage[2]) + int(usage[3]),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "shared": made.metadata.shared,
        "threads": 32 * made.metadata.num_warps,
        "hgmma": len(re.findall(r"\bHGMMA\b", code)),
        "wide_copies": len(re.findall(r"\bLDGSTS\.E\.BYPASS(?:\.\w+)*\.128\b", code)),
        "copies": len(re.findall(r"\bLDGSTS\b", code)),
        "wide_loads": len(re.findall(r"\bLDG\.E(?:\.\w+)*\.128\b", code)),
    }


def scores(spans=None, dtype=torch.bfloat16, head_dim=128, rows=64, **options):
    query = torch.empty(32, rows, head_dim, dtype=dtype)
    key = torch.empty(8, 4096, head_dim, dtype=dtype)
    at = Rows(tuple(range(4096 - rows, 4096))).on(torch.device("cpu"))
    return column_scores.column_scores(query, key, at, AttentionOptions(0.1, **options), spans)


def deviations():
    new, old = torch.empty(8, 600, 128, dtype=torch.bfloat16), torch.empty(8, 4096, 128, dtype=torch.bfloat16)
    return deviation.kv_deviation(new, old, Rows(tuple(range(600))).on(torch.device("cpu")))


SPANS = Spans(tuple((start, start + 128) for start in range(0, 4096, 128)))
CASES = {
    "all keys": scores,
    "spans": lambda: scores(SPANS),
    "deviation": deviations,
    "64 dimensions": lambda: scores(head_dim=64),
    "256 dimensions": lambda: scores(head_dim=256),
    "256 dimensions, all options": lambda: scores(SPANS, head_dim=256, window=512, softcap=50.0),
    "all options": lambda: scores(window=512, softcap=50.0),
    "float16, few rows": lambda: scores(dtype=torch.float16, rows=9),
    "many rows": lambda: scores(rows=2048),
    "float32": lambda: scores(dtype=torch.float32),
}

if __name__ == "__main__":
    folder, out = Path(sys.argv[1]), {}
    kernels = {
        "columns_kernel": column_scores,
        "log_sums_kernel": column_scores,
        "_deviation_kernel": deviation,
    }
    for case in sys.argv[2:]:
        stand_ins = {name: Recorded(getattr(module, name)) for name, module in kernels.items()}
        for name, module in kernels.items():
            setattr(module, name, stand_ins[name])
        CASES[case]()
        for name, module in kernels.items():
            setattr(module, name, stand_ins[name].kernel)
        out[case] = {name: findings(made, folder) for name, one in stand_ins.items() for made in one.made}
    sys.stdout.write(json.dumps(out))
