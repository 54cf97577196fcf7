"""Compiles the kernels' launches for Hopper (sm_90), without a GPU; run by test_compiled.py.

Arguments: a folder and cases (default: all). Prints, as JSON, what ptxas made of each kernel. Launches
are those of the library: only their execution is replaced. Not in Triton's interpreter.
"""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from ragcachekit_kernels import assembly, attention, moves, scores
from ragcachekit_kernels.dispatch import AttentionOptions, Group, Groups, Place, Places, Rotation, Rows, Spans

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
LAUNCH = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
CPU = torch.device("cpu")


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


def findings(made, folder):
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])

    def output(tool, *arguments):
        command = [str(TOOLS / tool), *arguments, str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    usage = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", output("cuobjdump", "-res-usage"))
    code = output("nvdisasm", "-c")
    kinds = {
        "spills": r"\b(?:STL|LDL)\b",
        "hgmma": r"\bHGMMA\b",
        "copies": r"\bLDGSTS\b",
        "wide_copies": r"\bLDGSTS\.E\.BYPASS(?:\.\w+)*\.128\b",
        "wide_loads": r"\bLDG\.E(?:\.\w+)*\.128\b",
        "wide_stores": r"\bSTG\.E(?:\.\w+)*\.128\b",
    }
    return {
        "registers": int(usage[1]),
        "stack": int(usage[2]) + int(usage[3]),
        "shared": made.metadata.shared,
        "threads": 32 * made.metadata.num_warps,
        "loop_spills": spills_in_loop(code) if "HGMMA" in code else 0,
        **{name: len(re.findall(kind, code)) for name, kind in kinds.items()},
    }


def spills_in_loop(text):
    """Accesses to local memory in the shortest loop with matrix products: the one without masks."""
    labels, code = {}, []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1])
    jumps = [(at, re.search(r"\bBRA\b.*(\.L_x_\d+)", text)) for at, text in enumerate(code)]
    loops = [code[labels[to[1]] : at + 1] for at, to in jumps if to and labels[to[1]] <= at]
    body = min((loop for loop in loops if any("HGMMA" in text for text in loop)), key=len)
    return sum(bool(re.search(r"\b(?:STL|LDL)\b", text)) for text in body)


def attend(head_dim=128, *, described=True, dtype=torch.bfloat16, rows=64, splits=1, **options):
    query = torch.empty(rows, 32, head_dim, dtype=dtype).transpose(0, 1)
    key = torch.empty(8, 4096, head_dim, dtype=dtype)
    at, own = Rows(tuple(range(4096 - rows, 4096))).on(CPU), AttentionOptions(0.1, **options)
    how = {"described": described, "plain": own.is_plain, "capability": (9, 0)}
    config = attention.config_for(torch.device("cuda"), dtype, head_dim, **how)
    attention.attention(query, key, key, at, own, config=config, splits=splits)


def score(spans=None, dtype=torch.bfloat16, head_dim=128, rows=64, **options):
    query, key = torch.empty(32, rows, head_dim, dtype=dtype), torch.empty(8, 4096, head_dim, dtype=dtype)
    at = Rows(tuple(range(4096 - rows, 4096))).on(CPU)
    scores.column_scores(query, key, at, AttentionOptions(0.1, **options), spans)


def assemble(heads=8, dim=128, pairs=64, offset=0, interleaved=False):
    pieces = [torch.zeros(heads, 64, dim, dtype=torch.bfloat16) for _ in range(2)]
    out, places = torch.empty(heads, 256, dim, dtype=torch.bfloat16), Places((Place(5, 64), Place(90, 64)))
    how = Rotation(torch.zeros(256, pairs), torch.zeros(256, pairs), interleaved, offset) if pairs else None
    assembly.assemble(out, pieces, places, how)


def move(dtype=torch.bfloat16, heads=8, dims=(128, 128), by=1, interleaved=False):
    sides = tuple(torch.empty(heads, 256, dim, dtype=dtype) for dim in dims)
    shifts, alike = tuple(torch.empty(heads, 20, dim) for dim in dims), torch.empty(heads, 20, dims[by])
    turn = Rotation(torch.zeros(256, 32), torch.zeros(256, 32), interleaved)
    groups = Groups((Group(3, 90, 0, 9), Group(90, 250, 9, 20)))
    moves.move_alike(sides, shifts, alike, by, groups, (turn, None) if by else (None, turn))


SPANS = Spans(tuple((start, start + 128) for start in range(0, 4096, 128)))
ALL = {"window": 512, "softcap": 50.0}
CASES = {
    "attention": attend,
    "attention, pointers": partial(attend, described=False),
    "attention, split, float16": partial(attend, dtype=torch.float16, splits=4),
    **{f"attention, {dim}": partial(attend, dim) for dim in (64, 80, 96, 192, 256)},
    **{f"attention, {dim}, pointers": partial(attend, dim, described=False) for dim in (64, 192, 256)},
    "attention, window": partial(attend, window=512),
    "attention, all options": partial(attend, **ALL, sinks=torch.empty(32)),
    "attention, all options, 256": partial(attend, 256, **ALL, sinks=torch.empty(32)),
    "scores, all keys": score,
    "scores, spans": partial(score, SPANS),
    **{f"scores, {dim}": partial(score, head_dim=dim) for dim in (64, 256)},
    "scores, all options": partial(score, **ALL),
    "scores, all options, 256": partial(score, SPANS, head_dim=256, **ALL),
    "scores, float16, few rows": partial(score, dtype=torch.float16, rows=9),
    "scores, many rows": partial(score, rows=2048),
    "scores, float32": partial(score, dtype=torch.float32),
    "assembly": assemble,
    "assembly, interleaved": partial(assemble, interleaved=True),
    "assembly, a quarter": partial(assemble, pairs=16, interleaved=True, offset=96),
    "assembly, 96 dimensions": partial(assemble, heads=32, dim=96, pairs=48),
    "assembly, latent": partial(assemble, heads=1, dim=512, pairs=0),
    "moves": move,
    "moves, float32, interleaved": partial(move, torch.float32, interleaved=True),
    "moves, latent": partial(move, heads=1, dims=(512, 64), by=0),
}

if __name__ == "__main__":
    folder, out = Path(sys.argv[1]), {}
    originals = [
        (module, name, kernel)
        for module in (assembly, attention, moves, scores)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    ]
    for case in sys.argv[2:] or CASES:
        recorded = {name: Recorded(kernel) for _, name, kernel in originals}
        for module, name, _ in originals:
            setattr(module, name, recorded[name])
        CASES[case]()
        out[case] = {
            name.strip("_"): findings(made, folder) for name, one in recorded.items() for made in one.made
        }
    sys.stdout.write(json.dumps(out))
