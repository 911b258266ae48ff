"""Attention over a paged cache: few queries by attention.cu, tiles of many by Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from vkit.kernels.cuda import library
from vkit.kernels.cuda.library import TYPES, Decode, is_aligned, pointer
from vkit.kernels.paged import PagedBatch
from vkit.kernels.triton import paged
from vkit.kernels.triton.fallback import say_once
from vkit.kernels.triton.paged import CHUNK, Cut, Shared

COLUMN_ROWS = 8
"""Query rows of one column of tiles."""
MAX_WIDTH = 256
MAX_WIDTH_OF_TWO = 128
"""Up to this width a block may have two columns: wider ones do not fit in registers."""
NUM_COUNTERS = 1 << 16
"""At first; a step that needs more gets more."""

_counters: dict[torch.device, list[Tensor]] = {}


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """As the reference of this name."""
    decode = _decode if _fits(q, k_cache, v_cache) else None
    return paged.paged_attention(q, k_cache, v_cache, batch, scale, window, soft_cap, sinks, chunk=chunk, decode=decode)


def _fits(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether rows can be loaded sixteen bytes at a time; what cannot is left to Triton, said once."""
    if k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        return False  # `paged` says what becomes of narrow caches
    widths = (q.shape[-1], v_cache.shape[-1])
    rows = [stride for x in (q, k_cache, v_cache) for stride in x.stride()[:-1]]
    if max(widths) > MAX_WIDTH:
        reason = f"heads of {widths[0]}/{widths[1]}, more than {MAX_WIDTH} wide"
    elif any(number % 8 for number in (*widths, *rows)) or not is_aligned(q, k_cache, v_cache):
        reason = f"rows of {widths[0]}/{widths[1]} that do not begin at multiples of 16 bytes"
    elif any(x.stride(-1) != 1 for x in (q, k_cache, v_cache)):
        reason = "rows whose elements do not follow each other"
    else:
        return True
    say_once("attention", f"no cuda kernel for {reason}; triton runs it")
    return False


def _decode(shared: Shared, batch: PagedBatch, cut: Cut, out: Tensor, chunk: int) -> None:
    """The `Decode` of attention.cu."""
    sequences, (heads, value_width) = len(batch.host_seq_lens), out.shape[1:]
    group, width = shared.constants["G"], shared.constants["D"]
    scale, soft_cap, window = shared.numbers
    lines = group * cut.max_queries
    columns = 2 if lines > COLUMN_ROWS and max(width, value_width) <= MAX_WIDTH_OF_TWO else 1
    num_tiles = -(-lines // (COLUMN_ROWS * columns))
    part = part_lse = counters = None
    if cut.num_splits > 1:
        shape = (sequences, cut.num_splits, cut.max_queries, heads)
        part = torch.empty(*shape, value_width, dtype=torch.float32, device=out.device)
        part_lse = torch.empty(shape, dtype=torch.float32, device=out.device)
        counters = _counters_of(out.device, sequences * heads // group * num_tiles)
    sinks = None if shared.sinks is None else shared.sinks.float()
    arguments = Decode(
        *map(pointer, (shared.q, shared.k_cache, shared.v_cache, out, part, part_lse, sinks, counters)),
        *map(pointer, shared.batch), *shared.strides,
        sequences, heads // group, group, shared.constants["S"], width, value_width, cut.max_queries, cut.num_splits,
        chunk, window, TYPES[out.dtype], num_tiles, columns, scale, soft_cap if shared.constants["HAS_CAP"] else 0.0,
    )  # fmt: skip
    library.load_library().start("decode", arguments, out.device)


def _counters_of(device: torch.device, count: int) -> Tensor:
    """At least `count` counters, all zero whenever no kernel runs.

    Those that have become too few are kept: a captured graph may hold them.
    """
    kept = _counters.setdefault(device, [])
    if not kept or kept[-1].numel() < count:
        kept.append(torch.zeros(max(NUM_COUNTERS, count), dtype=torch.int32, device=device))
    return kept[-1]
