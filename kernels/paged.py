"""Where the tokens of a step lie in the paged cache: the argument that every attention op shares."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class PagedBatch:
    """One step's sequences in one cache group.

    Token t of a sequence lies in slot `block_table[row][t // S] * S + t % S`. A step's queries are the last tokens of
    each sequence: query_len of seq_len. Table entries beyond a sequence's blocks, and those of blocks wholly before a
    sliding window, mean nothing and must not be followed; slots beyond a sequence's end may hold NaN.
    """

    block_table: Tensor
    """(rows, max_blocks) int32, kept between steps; one row per running sequence, in no particular order."""
    rows: Tensor
    """(B,) int32: the row of each sequence of this step."""
    slot_mapping: Tensor
    """(T,) int64: the slot that each new token is written to; -1 writes nothing."""
    seq_lens: Tensor
    """(B,) int32: tokens in the cache once this step has written its own."""
    cu_seqlens: Tensor
    """(B + 1,) int32: sequence b owns queries cu_seqlens[b] .. cu_seqlens[b + 1] - 1."""
    host_rows: list[int]
    host_seq_lens: list[int]
    host_cu_seqlens: list[int]
    """The same three on the host, for choices that must not wait for the device."""
    memo: dict[object, object] = field(default_factory=dict)
    """What a backend derives from the above once per step, for its own later calls."""

    @property
    def num_tokens(self) -> int:
        """Queries of all sequences together."""
        return self.host_cu_seqlens[-1]
