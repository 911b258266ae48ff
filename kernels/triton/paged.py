"""Launches the attention kernels: which sequences go to which, and with which tiles."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from vkit.kernels.paged import PagedBatch
from vkit.kernels.reference.narrow_cache import SCALE_BYTES
from vkit.kernels.triton import latent
from vkit.kernels.triton.attention import decode_kernel, merge_kernel, prefill_kernel
from vkit.kernels.triton.cache import FORMATS, as_bytes, format_of
from vkit.kernels.triton.common import Ahead, power_of_two
from vkit.kernels.triton.narrow import INT8

CHUNK = 512
"""Keys of one part of a sequence with few queries. Fixed, so that a result does not depend on what else runs."""
MAX_QUERIES = 8
"""Queries a sequence may have and still be cut along its keys."""
MAX_DECODE_ROWS = 64
_MMA_SYNC = (8, 12)
"""Major capabilities whose products are all done by mma.sync, with operands in registers."""


@dataclass(frozen=True)
class Tiles:
    """How much one program works on at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def decode_tiles(rows: int, width: int) -> Tiles:
    """For the decode kernel. Chosen by the registers and shared memory they take; not measured."""
    return Tiles(max(16, power_of_two(rows)), 32 if width > 128 else 64, 4, 2 if width > 256 else 3)


def prefill_tiles(group: int, width: int, major: int, *, is_scaled: bool = False) -> Tiles:
    """For the prefill kernel on cards of capability `major`; is_scaled: over a cache of int8.

    Chosen so that none spills; not measured.
    """
    if width > 128:
        rows, keys, num_warps = 64, 32, 8 if major in _MMA_SYNC else 4
    elif width > 64:
        rows, keys, num_warps = 128, 32 if major in _MMA_SYNC or is_scaled else 64, 8
    else:
        rows, keys, num_warps = 128, 64, 4 if major == 10 else 8
    return Tiles(max(rows, power_of_two(group)), keys, num_warps, 2)


@functools.cache
def _major(device: torch.device) -> int:
    """The card's major capability; the interpreter plays a card of 9.0."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


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
    decode: Decode | None = None,
) -> Tensor:
    """As the reference of this name; `decode` runs in place of the kernel for sequences with few queries."""
    value_width = v_cache.shape[-1] - (SCALE_BYTES if v_cache.dtype is torch.int8 else 0)
    out = torch.empty(*q.shape[:2], value_width, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    if q.stride(-1) != 1:
        q = q.contiguous()
    if _is_latent(k_cache, v_cache) and window is None and soft_cap is None and sinks is None:
        _latent(q, k_cache, batch, scale, out, chunk)
        return out
    group = q.shape[1] // k_cache.shape[2]
    cut = Cut.of(batch, window, chunk, max(1, min(MAX_QUERIES, MAX_DECODE_ROWS // group)))
    shared = Shared.of(q, k_cache, v_cache, value_width, batch, scale, window, soft_cap, sinks)
    if cut.num_splits:
        (decode or decode_by_triton)(shared, batch, cut, out, chunk)
    if cut.has_prefills:
        _prefill(shared, batch, cut, out)
    return out


@dataclass(frozen=True)
class Cut:
    """How a step's sequences are dealt out. Derived from lengths the host knows; the kernels read the device's."""

    num_splits: int
    """Parts of the longest sequence with few queries; 0: there is none."""
    max_queries: int
    """Queries of the longest such sequence, as a power of two."""
    limit: int
    """Queries up to which a sequence counts as having few."""
    has_prefills: bool

    @staticmethod
    def of(batch: PagedBatch, window: int | None, chunk: int, limit: int) -> Cut:
        """The cut of a step, remembered for its other layers."""
        key = ("triton.cut", window, chunk, limit)
        known = batch.memo.get(key)
        if isinstance(known, Cut):
            return known
        limit = 1 << (limit.bit_length() - 1)
        cu = batch.host_cu_seqlens
        counts = [after - before for before, after in itertools.pairwise(cu)]
        few = [(n, length) for n, length in zip(counts, batch.host_seq_lens, strict=True) if n <= limit]
        num_splits = max((_num_parts(n, length, window, chunk) for n, length in few), default=0)
        max_queries = power_of_two(max((n for n, _ in few), default=1))
        cut = Cut(num_splits, max_queries, limit, len(few) < len(counts))
        batch.memo[key] = cut
        return cut


def _num_parts(num_queries: int, length: int, window: int | None, chunk: int) -> int:
    """The most parts of a sequence of up to `length` tokens; a shorter one's window may lie across one chunk more."""
    parts = -(-length // chunk)
    if window is not None:
        parts = min(parts, (window + num_queries - 3) // chunk + 2)
    return max(1, parts)


@dataclass(frozen=True)
class Shared:
    """What both kernels take alike."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    sinks: Tensor | None
    batch: tuple[Tensor, ...]
    numbers: tuple[float, float, int]
    strides: tuple[int, ...]
    constants: dict[str, Any]

    @staticmethod
    def of(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        value_width: int,
        batch: PagedBatch,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> Shared:
        """The arguments of one call, in the kernels' order."""
        width, form = q.shape[-1], format_of(k_cache.dtype)
        k_cache, v_cache = as_bytes(k_cache), as_bytes(v_cache)
        constants = {
            "G": q.shape[1] // k_cache.shape[2],
            "S": k_cache.shape[1],
            "D": width,
            "DV": value_width,
            "BLOCK_D": max(16, power_of_two(width)),
            "BLOCK_DV": max(16, power_of_two(value_width)),
            "HAS_WINDOW": window is not None,
            "HAS_CAP": soft_cap is not None,
            "HAS_SINKS": sinks is not None,
            "FORMAT": form,
        }
        return Shared(
            q,
            k_cache,
            v_cache,
            None if sinks is None else sinks.contiguous(),
            (batch.block_table, batch.rows, batch.seq_lens, batch.cu_seqlens),
            (float(scale), float(soft_cap or 1.0), window or 0),
            (batch.block_table.stride(0), *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3]),
            constants,
        )


class Decode(Protocol):
    """Attention of sequences with few queries."""

    def __call__(self, shared: Shared, batch: PagedBatch, cut: Cut, out: Tensor, chunk: int, /) -> None:
        """Write the results of every sequence of up to cut.limit queries to `out` (T, H, Dv)."""


def decode_by_triton(shared: Shared, batch: PagedBatch, cut: Cut, out: Tensor, chunk: int) -> None:
    """The `Decode` of this module."""
    num_sequences, (num_heads, value_width) = len(batch.host_seq_lens), out.shape[1:]
    constants = shared.constants
    num_kv_heads = num_heads // constants["G"]
    is_split = cut.num_splits > 1
    part, part_lse = out, out
    if is_split:
        shape = (num_sequences, cut.num_splits, cut.max_queries, num_heads)
        part = torch.empty(*shape, value_width, dtype=torch.float32, device=out.device)
        part_lse = torch.empty(shape, dtype=torch.float32, device=out.device)
    tiles = decode_tiles(constants["G"] * cut.max_queries, max(constants["BLOCK_D"], constants["BLOCK_DV"]))
    sinks = out if shared.sinks is None else shared.sinks
    decode_kernel[(num_sequences, num_kv_heads, cut.num_splits)](
        shared.q, shared.k_cache, shared.v_cache, out, part, part_lse, sinks,
        *shared.batch, *shared.numbers, cut.num_splits, *shared.strides, **constants,
        MAX_QUERIES=cut.max_queries, ROWS=tiles.rows, KEYS=min(tiles.keys, chunk), CHUNK=chunk, IS_SPLIT=is_split,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if is_split:
        merge_kernel[(num_sequences, cut.max_queries, num_heads)](
            part, part_lse, sinks, batch.seq_lens, batch.cu_seqlens, out, shared.numbers[2], cut.num_splits,
            DV=value_width, BLOCK_DV=constants["BLOCK_DV"], MAX_QUERIES=cut.max_queries, CHUNK=chunk,
            HAS_WINDOW=constants["HAS_WINDOW"], HAS_SINKS=constants["HAS_SINKS"], num_warps=1,
        )  # fmt: skip


def _prefill(shared: Shared, batch: PagedBatch, cut: Cut, out: Tensor) -> None:
    constants = shared.constants
    num_sequences = len(batch.host_seq_lens)
    width, is_scaled = max(constants["BLOCK_D"], constants["BLOCK_DV"]), constants["FORMAT"] == INT8.value
    tiles = prefill_tiles(constants["G"], width, _major(out.device), is_scaled=is_scaled)
    most = out.shape[0] // (tiles.rows // constants["G"]) + num_sequences
    prefill_kernel[(most, out.shape[1] // constants["G"])](
        shared.q, shared.k_cache, shared.v_cache, out, out if shared.sinks is None else shared.sinks,
        *shared.batch, *shared.numbers, num_sequences, *shared.strides, **constants,
        MAX_DECODED=cut.limit, ROWS=tiles.rows, KEYS=tiles.keys,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _is_latent(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether values are the first columns of the one key of a token."""
    is_one = k_cache.shape[2] == 1 and k_cache.dtype not in FORMATS and v_cache.shape[-1] < k_cache.shape[-1]
    return is_one and k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride() == v_cache.stride()


def _latent(q: Tensor, cache: Tensor, batch: PagedBatch, scale: float, out: Tensor, chunk: int) -> None:
    num_sequences, (num_heads, value_width) = len(batch.host_seq_lens), out.shape[1:]
    cut = Cut.of(batch, None, chunk, MAX_QUERIES)
    rest = q.shape[-1] - value_width
    constants: dict[str, Any] = {
        "H": num_heads,
        "S": cache.shape[1],
        "DV": value_width,
        "DR": rest,
        "KEYS": min(latent.KEYS, chunk),
        "BLOCK_DV": max(16, power_of_two(value_width)),
        "BLOCK_DR": max(16, power_of_two(rest)),
        "CHUNK": chunk,
    }
    shared = (batch.block_table, batch.rows, batch.seq_lens, batch.cu_seqlens, float(scale), num_sequences)
    strides = (batch.block_table.stride(0), *q.stride()[:2], *cache.stride()[:2])
    if cut.num_splits:
        is_split = cut.num_splits > 1
        shape = (num_sequences, cut.num_splits, cut.max_queries, num_heads) if is_split else (0,)
        part = torch.empty(*shape, value_width, dtype=torch.float32, device=out.device)
        part_lse = torch.empty(shape, dtype=torch.float32, device=out.device)
        rows = latent.row_tile(cut.max_queries * num_heads)
        grid = (num_sequences, triton.cdiv(cut.max_queries * num_heads, rows), cut.num_splits)
        latent.latent_kernel[grid](
            q, cache, out, part, part_lse, *shared, cut.num_splits, *strides, **constants,
            MAX_QUERIES=cut.max_queries, ROWS=rows, IS_SPLIT=is_split, IS_PREFILL=False,
            num_warps=latent.num_warps(rows), num_stages=latent.STAGES,
        )  # fmt: skip
        if is_split:
            merge_kernel[(num_sequences, cut.max_queries, num_heads)](
                part, part_lse, part, batch.seq_lens, batch.cu_seqlens, out, 0, cut.num_splits,
                DV=value_width, BLOCK_DV=constants["BLOCK_DV"], MAX_QUERIES=cut.max_queries, CHUNK=chunk,
                HAS_WINDOW=False, HAS_SINKS=False, num_warps=1,
            )  # fmt: skip
    if cut.has_prefills:
        rows = latent.MOST_ROWS
        latent.latent_kernel[(out.shape[0] * num_heads // rows + num_sequences,)](
            q, cache, out, out, out, *shared, 1, *strides, **constants,
            MAX_QUERIES=cut.limit, ROWS=rows, IS_SPLIT=False, IS_PREFILL=True,
            num_warps=latent.num_warps(rows), num_stages=latent.STAGES,
        )  # fmt: skip


PREFILL_TARGETS = (("sm_80", 8, "mma.sync"), ("sm_90", 9, "wgmma.mma_async"), ("sm_100", 10, "tcgen05.mma"))
POINTERS = dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*bf16")
BATCH = dict.fromkeys(("table", "rows", "seq_lens", "cu_seqlens"), "*i32")
STRIDES = dict.fromkeys(("q_token", "q_head", "k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head"), "i32:16")
NUMBERS = {"scale": "fp32", "soft_cap": "fp32", "window": "i32", "table_row": "i32"}


def _constants(group: int, width: int, dtype: torch.dtype | None = None, **flags: bool) -> dict[str, object]:
    names = ("HAS_WINDOW", "HAS_CAP", "HAS_SINKS")
    sizes = {
        "FORMAT": FORMATS.get(dtype, 0) if dtype else 0,
        "G": group,
        "S": 16,
        "D": width,
        "DV": width,
        "BLOCK_D": power_of_two(width),
    }
    return {**sizes, "BLOCK_DV": power_of_two(width), **{name: flags.get(name, False) for name in names}}


def _ahead_decode(
    name: str,
    group: int,
    width: int,
    *,
    split: bool = True,
    queries: int = 1,
    dtype: torch.dtype | None = None,
    **flags: bool,
) -> Ahead:
    tiles = decode_tiles(group * queries, power_of_two(width))
    signature = {
        **_pointers(dtype),
        "part": "*fp32",
        "part_lse": "*fp32",
        "sinks": "*fp32",
        **BATCH,
        **NUMBERS,
        **STRIDES,
    }
    constants = {"MAX_QUERIES": queries, "ROWS": tiles.rows, "KEYS": tiles.keys, "CHUNK": CHUNK, "IS_SPLIT": split}
    return Ahead(
        name,
        decode_kernel,
        {**signature, "num_splits": "i32"},
        {**_constants(group, width, dtype, **flags), **constants},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        expects={"all": ("mma.sync",)},
    )


def _ahead_prefill(
    name: str, group: int, width: int, *, dtype: torch.dtype | None = None, **flags: bool
) -> Iterator[Ahead]:
    signature = {**_pointers(dtype), "sinks": "*fp32", **BATCH, **NUMBERS, **STRIDES, "num_sequences": "i32"}
    for target, major, instruction in PREFILL_TARGETS:
        tiles = prefill_tiles(group, power_of_two(width), major, is_scaled=dtype is torch.int8)
        constants = {"MAX_DECODED": MAX_QUERIES, "ROWS": tiles.rows, "KEYS": tiles.keys}
        yield Ahead(
            f"{name}_{target}",
            prefill_kernel,
            signature,
            {**_constants(group, width, dtype, **flags), **constants},
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            targets=(target,),
            expects={target: (instruction,)},
        )


def _pointers(dtype: torch.dtype | None) -> dict[str, str]:
    return POINTERS if dtype is None else {**POINTERS, "k_cache": "*u8", "v_cache": "*u8"}


def _ahead_merge(width: int, **flags: bool) -> Ahead:
    pointers = dict.fromkeys(("part", "part_lse", "sinks"), "*fp32")
    signature = {**pointers, "seq_lens": "*i32", "cu_seqlens": "*i32", "out": "*bf16"}
    constants = {"DV": width, "BLOCK_DV": power_of_two(width), "MAX_QUERIES": 1, "CHUNK": CHUNK}
    names = ("HAS_WINDOW", "HAS_SINKS")
    return Ahead(
        f"merge_{width}",
        merge_kernel,
        {**signature, "window": "i32", "num_splits": "i32"},
        {**constants, **{name: flags.get(name, False) for name in names}},
        num_warps=1,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


AHEAD = (
    _ahead_decode("decode_64_g8_sinks_window", 8, 64, HAS_WINDOW=True, HAS_SINKS=True),
    _ahead_decode("decode_128_g4", 4, 128),
    _ahead_decode("decode_128_g4_whole", 4, 128, split=False),
    _ahead_decode("decode_128_g4_8_queries", 4, 128, queries=8),
    _ahead_decode("decode_96_g1", 1, 96),
    _ahead_decode("decode_256_g2_cap_window", 2, 256, HAS_WINDOW=True, HAS_CAP=True),
    _ahead_merge(128),
    _ahead_merge(256, HAS_WINDOW=True, HAS_SINKS=True),
    *_ahead_prefill("prefill_64_g8_sinks_window", 8, 64, HAS_WINDOW=True, HAS_SINKS=True),
    *_ahead_prefill("prefill_128_g4", 4, 128),
    *(_ahead_decode(f"decode_128_g4_{_name(dtype)}", 4, 128, dtype=dtype) for dtype in FORMATS),
    *itertools.chain.from_iterable(
        _ahead_prefill(f"prefill_128_g4_{_name(dtype)}", 4, 128, dtype=dtype) for dtype in FORMATS
    ),
    *_ahead_prefill("prefill_128_g7", 7, 128),
    *_ahead_prefill("prefill_96_g1", 1, 96),
    *_ahead_prefill("prefill_256_g2_cap_window", 2, 256, HAS_WINDOW=True, HAS_CAP=True),
)
