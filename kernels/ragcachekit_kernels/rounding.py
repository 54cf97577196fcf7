"""Casts from float32 that round to nearest, halves to even, in Triton's interpreter as on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, TYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """Float32 ``x`` as ``TYPE``.

    BY_HAND for the interpreter, which cuts bfloat16 off and loses the carry of some e4m3 numbers: there
    the number is made one that needs no rounding first.
    """
    if BY_HAND and TYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(tl.abs(x) < float("inf"), even, bits).to(tl.float32, bitcast=True)
    if BY_HAND and TYPE == tl.float8e4nv:  # noqa: SIM300
        exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 121)  # below 2^-6: subnormal
        step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
        x = (x + 12582912.0 * step) - 12582912.0 * step
    return x.to(TYPE)
