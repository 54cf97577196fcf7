"""Compiles the attention kernels for Hopper, without a GPU; run by test_compiled_attention.py.

Prints, as JSON, what ptxas made of them and of the loop over keys that all rows see. Launches are those of
the library with its default configs: only their execution is replaced.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
import triton
from compile_scores import LAUNCH, TOOLS, TYPES, findings
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from ragcachekit_kernels.attention import row_attention
from ragcachekit_kernels.attention.configs import Case, default_config
from ragcachekit_kernels.options import AttentionOptions
from ragcachekit_kernels.rows import KVTable, Rows


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
        signature, constants, hints = {}, {}, {}
        for place, name in enumerate(names):
            kind, aligned = type_of(name, given[name])
            signature[name] = kind
            if kind == "constexpr":
                constants[(place,)] = given[name]
            if aligned and name not in (self.kernel.do_not_specialize or ()):
                hints[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature=signature, constexprs=constants, attrs=hints)
        self.made.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


def type_of(name, value):
    """As Triton's own launch types an argument, and whether it is a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype], True
    if isinstance(value, TensorDescriptor):
        shape = ",".join(str(size) for size in value.block_shape)
        return f"tensordesc<{TYPES[value.base.dtype][1:]}[{shape}]>", False
    if value is None or name.isupper():
        return "constexpr", False
    return ("fp32", False) if isinstance(value, float) else ("i32", value % 16 == 0)


def loop_over_keys(made, folder):
    """Instructions of the shortest loop with matrix products: the one without masks."""
    cubin = folder / "loop.cubin"
    cubin.write_bytes(made.asm["cubin"])
    command = [str(TOOLS / "nvdisasm"), "-c", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    labels, code = {}, []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1])
    jumps = [(at, re.search(r"\bBRA\b.*(\.L_x_\d+)", text)) for at, text in enumerate(code)]
    loops = [code[labels[to[1]] : at + 1] for at, to in jumps if to and labels[to[1]] <= at]
    body = "\n".join(min((b for b in loops if any("HGMMA" in i for i in b)), key=len))
    kinds = {"hgmma": "HGMMA", "spills": "(?:STL|LDL)", "tensor_loads": "UTMALDG", "copies": "LDGSTS"}
    return {name: len(re.findall(rf"\b{kind}\b", body)) for name, kind in kinds.items()}


def attend(head_dim=128, *, table=False, dtype=torch.bfloat16, rows=64, tokens=4096, splits=None, **options):
    query = torch.empty(rows, 32, head_dim, dtype=dtype).transpose(0, 1)
    key = torch.empty(8, tokens, head_dim, dtype=dtype)
    at = Rows(tuple(range(tokens - rows, tokens))).on(torch.device("cpu"))
    own = AttentionOptions(0.1, **options)
    case = Case(query.device, dtype, head_dim, head_dim, table, own.is_plain)
    config = default_config(case, (9, 0))
    launch = {"config": config, "splits": splits}
    if not table:
        return row_attention.attention(query, key, key, at, own, **launch)
    entries = KVTable(torch.empty(4, 4, dtype=torch.int64), dtype)
    return row_attention.attention_at(query, entries, 1, 8, head_dim, at, own, tokens=tokens, **launch)


ALL = {"window": 512, "softcap": 50.0, "sinks": torch.empty(32)}
CASES = {
    "pointers": partial(attend, splits=1),
    "table, split": partial(attend, table=True, splits=4),
    "64": partial(attend, 64, splits=1),
    "64, table": partial(attend, 64, table=True, splits=1),
    "80": partial(attend, 80, splits=1),
    "96": partial(attend, 96, splits=1),
    "192": partial(attend, 192, splits=1),
    "192, table": partial(attend, 192, table=True, splits=1),
    "256": partial(attend, 256, splits=1),
    "256, table": partial(attend, 256, table=True, splits=1),
    "window": partial(attend, splits=1, window=512),
    "all options": partial(attend, splits=1, **ALL),
    "all options, table": partial(attend, table=True, splits=1, **ALL),
    "all options, 256": partial(attend, 256, splits=1, **ALL),
    "float16": partial(attend, splits=2, dtype=torch.float16),
}

if __name__ == "__main__":
    folder, out = Path(sys.argv[1]), {}
    kernels = {name: getattr(row_attention, name) for name in ("attention_kernel", "merge_kernel")}
    for case in sys.argv[2:]:
        stand_ins = {name: Recorded(kernel) for name, kernel in kernels.items()}
        for name, stand_in in stand_ins.items():
            setattr(row_attention, name, stand_in)
        CASES[case]()
        out[case] = {name: findings(made, folder) for name, one in stand_ins.items() for made in one.made}
        out[case]["loop"] = loop_over_keys(stand_ins["attention_kernel"].made[0], folder)
    sys.stdout.write(json.dumps(out))
