"""What every Triton kernel shares: rounding, products, and how a kernel is described to the compiler ahead of time.

Under the interpreter (`TRITON_INTERPRET=1`, kernels run on the CPU for tests) arithmetic on bfloat16 works on raw bit
patterns, and casts to it truncate. So kernels widen after a load, narrow with `rounded` and multiply with `product`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of activations the kernels take."""


@dataclass(frozen=True)
class Ahead:
    """One specialisation of a kernel, as the ahead-of-time compilation and its table of resources know it."""

    name: str
    kernel: Any
    signature: Mapping[str, str]
    """Argument -> type; pointers are taken to be aligned to 16 bytes, integers only where the type ends in ":16"."""
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    targets: tuple[str, ...] = ("sm_80", "sm_90", "sm_100")
    """Where it is compiled with these constants."""
    expects: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Target ("sm_90", or "all") -> instructions its PTX must hold: a change of tiles cannot lose them unseen."""


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


@triton.jit  # type: ignore[untyped-decorator]
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """float32 x in `dtype`, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a @ b with float32 sums; float32 operands are not rounded to tf32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")
