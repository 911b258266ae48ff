"""Edits of logits rows in place: masks of bits over whole rows, penalties of the tokens used. Bound by memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.triton.common import Ahead

BLOCK = 1024


@triton.jit(do_not_specialize=["width", "num_words"])  # type: ignore[untyped-decorator]
def mask_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    words: tl.tensor,
    width: tl.tensor,
    num_words: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """−inf where bit i of word w, id 32 w + i, is not set; nothing else is read or written. Grid (B, pieces)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + row * num_words + token // 32, mask=token < width, other=-1)
    is_forbidden = (word >> (token % 32)) & 1 == 0
    at = logits + tl.load(rows + row) * row_stride + token
    tl.store(at, tl.full([BLOCK], -float("inf"), tl.float32), mask=is_forbidden & (token < width))


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def penalise_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    owners: tl.tensor,
    penalties: tl.tensor,
    count: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Each entry edits one logit, and no two the same one. Grid (pieces of the entries)."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < count
    owner = tl.load(owners + entry, mask=is_entry, other=0)
    used = tl.load(counts + entry, mask=is_entry, other=0.0)
    repetition = tl.load(penalties + 3 * owner, mask=is_entry, other=1.0)
    frequency = tl.load(penalties + 3 * owner + 1, mask=is_entry, other=0.0)
    presence = tl.load(penalties + 3 * owner + 2, mask=is_entry, other=0.0)
    row = tl.load(rows + owner, mask=is_entry, other=0)
    at = logits + row * row_stride + tl.load(ids + entry, mask=is_entry, other=0)
    x = tl.load(at, mask=is_entry, other=0.0)
    x = tl.where(x > 0.0, x / repetition, x * repetition)
    x = x - frequency * used - tl.where(used > 0.0, presence, 0.0)
    tl.store(at, x, mask=is_entry)


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """As the reference of this name."""
    if not words.numel():
        return
    width = logits.shape[1]
    words = words.contiguous()
    mask_kernel[(rows.shape[0], triton.cdiv(width, BLOCK))](
        logits, rows, words, width, words.shape[1], _row_stride(logits), BLOCK=BLOCK, num_warps=4
    )


def penalise(logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, owners: Tensor, penalties: Tensor) -> None:
    """As the reference of this name."""
    if not ids.numel():
        return
    penalise_kernel[(triton.cdiv(ids.shape[0], BLOCK),)](
        logits, rows, ids, counts, owners, penalties.contiguous(), ids.shape[0], _row_stride(logits),
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def _row_stride(logits: Tensor) -> int:
    if logits.stride(1) != 1:
        raise ValueError(f"logits of strides {logits.stride()}, expected rows of neighbours")
    return logits.stride(0)


AHEAD = (
    Ahead(
        "mask_tokens",
        mask_kernel,
        {
            "logits": "*fp32",
            "rows": "*i64",
            "words": "*i32",
            "width": "i32",
            "num_words": "i32",
            "row_stride": "i32:16",
        },
        {"BLOCK": BLOCK},
    ),
    Ahead(
        "penalise",
        penalise_kernel,
        {
            "logits": "*fp32",
            "rows": "*i64",
            "ids": "*i64",
            "counts": "*fp32",
            "owners": "*i32",
            "penalties": "*fp32",
            "count": "i32",
            "row_stride": "i32:16",
        },
        {"BLOCK": BLOCK},
    ),
)
