"""Products of few rows with a packed weight: the arguments of packed.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from vkit.kernels.block_formats import PLANE_SUFFIX, format_of
from vkit.kernels.cuda import library
from vkit.kernels.cuda.library import TYPES, Packed, is_aligned, pointer
from vkit.kernels.dispatch import next_best
from vkit.kernels.triton.fallback import say_once

MAX_TOKENS = 8
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
"""In the order of VkFormat in formats.cuh."""
ALIGNMENT = {"Q4_1": 4, "Q5_1": 4, "Q4_K": 8, "Q5_K": 8, "IQ4_XS": 4, "MXFP4": 1}
"""Bytes that blocks begin at a multiple of; 2 for the others. Rows in planes: 16."""


def quantized_linear(x: Tensor, data: Tensor, qtype: str, bias: Tensor | None = None) -> Tensor:
    """As the reference of this name; more than eight rows, and other formats, are left to the next backend."""
    tokens = x.numel() // x.shape[-1] if x.shape[-1] else 0
    if tokens > MAX_TOKENS or not _fits(data, qtype):
        following: Tensor = next_best("quantized_linear", x, after="cuda")(x, data, qtype, bias)
        return following
    out = torch.empty(*x.shape[:-1], data.shape[0], dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    rows = x.reshape(tokens, -1)
    if rows.stride(-1) != 1 or not is_aligned(rows) or rows.stride(0) * rows.element_size() % 16:
        rows = rows.clone(memory_format=torch.contiguous_format)
    bias = None if bias is None else bias.contiguous()
    name = qtype.removesuffix(PLANE_SUFFIX)
    arguments = Packed(
        pointer(rows), pointer(data), pointer(bias), pointer(out), data.shape[0], data.stride(0),
        x.shape[-1] // format_of(name, "quantized_linear").num_elements, rows.stride(0), data.shape[0],
        tokens, TYPES[x.dtype], TYPES[x.dtype if bias is None else bias.dtype], FORMATS.index(name), name != qtype,
    )  # fmt: skip
    library.load_library().start("packed", arguments, x.device)
    return out


def _fits(data: Tensor, qtype: str) -> bool:
    """Whether there is a kernel for these rows; if not it is said once."""
    name = qtype.removesuffix(PLANE_SUFFIX)
    alignment = 16 if name != qtype else ALIGNMENT.get(name, 2)
    if name not in FORMATS:
        reason = f"{qtype}"
    elif data.stride(-1) != 1 or data.stride(0) % alignment or not is_aligned(data, num_bytes=alignment):
        reason = f"rows of {qtype} that do not begin at multiples of {alignment} bytes"
    else:
        return True
    say_once("quantized_linear", f"no cuda kernel for {reason}; the next backend runs it")
    return False
