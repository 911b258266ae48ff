"""What each layer keeps between steps, and how layers are gathered into groups that share a block table.

Host only: no torch. The tensor store (store.py) reads these to allocate memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Protocol

MAX_GROUPS_OF_A_KIND = 8
"""Groups that layers of one kind are cut into at most."""
MAX_PAGE_RATIO = 1.25
"""How many more pages than the fewest possible are accepted for the sake of fewer groups."""


class CacheKind(StrEnum):
    """How a layer's memory grows with the sequence."""

    FULL = "full"
    """One slot per token, all kept."""
    SLIDING = "sliding"
    """One slot per token; blocks wholly outside the window are given back."""
    STATE = "state"
    """One row per sequence, overwritten in place (recurrent and convolution states)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor a layer keeps: per token (shape without the token axis), or per sequence for STATE."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """A torch dtype's name, such as "float32"."""
    itemsize: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one token's (or one sequence's) tensor."""
        total = self.itemsize
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class LayerCacheSpec:
    """What one layer keeps. Attention layers name their tensors "k" and "v" with shape (num_kv_heads, head_dim)."""

    kind: CacheKind
    tensors: tuple[TensorSpec, ...]
    window: int | None = None
    """Tokens visible to a query, itself included; SLIDING only."""
    granule: int = 1
    """Tokens that one entry spans, of which each keeps a part. Blocks that are shared must hold whole entries."""

    @property
    def bytes_per_unit(self) -> int:
        """Bytes per token (FULL, SLIDING) or per sequence (STATE)."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one kind (and window) that share a block table; not always all of that kind."""

    index: int
    kind: CacheKind
    layers: tuple[int, ...]
    window: int | None = None


def group_layers(specs: list[LayerCacheSpec | None]) -> list[CacheGroup]:
    """Gather layers by kind and window, in order of first appearance; None marks a layer that keeps nothing.

    A block takes as many pages as the largest group has layers, so one large group would make the blocks of a small one
    mostly empty: 48 recurrent layers beside 16 of attention become three groups of 16.
    """
    members: dict[tuple[CacheKind, int | None], list[int]] = {}
    for layer, spec in enumerate(specs):
        if spec is not None:
            members.setdefault((spec.kind, spec.window), []).append(layer)
    size = _group_size([len(layers) for layers in members.values()])
    pieces = [
        (kind, window, piece) for (kind, window), layers in members.items() for piece in _even_pieces(layers, size)
    ]
    return [CacheGroup(index, kind, piece, window) for index, (kind, window, piece) in enumerate(pieces)]


def _group_size(counts: list[int]) -> int:
    """The most layers of a group: the largest number with which a block of every group takes few pages.

    Each group has a block table of its own to keep, so a slightly fuller block is not worth more groups.
    """
    least = -(-max(counts, default=0) // MAX_GROUPS_OF_A_KIND)
    pages = {size: size * sum(-(-count // size) for count in counts) for size in (max(n, least) for n in counts)}
    fewest = min(pages.values(), default=0)
    return max((size for size, needed in pages.items() if needed <= MAX_PAGE_RATIO * fewest), default=0)


def _even_pieces(layers: list[int], size: int) -> list[tuple[int, ...]]:
    """`layers` in order, cut into as few pieces of at most `size` as there can be, as even as they can be."""
    num_pieces = -(-len(layers) // size)
    bounds = [len(layers) * piece // num_pieces for piece in range(num_pieces + 1)]
    return [tuple(layers[start:stop]) for start, stop in pairwise(bounds)]


BlockAt = Callable[[int], int | None]
"""Index of a full block in a sequence's chain -> the block that holds its content, or None."""


class GroupRules(Protocol):
    """What one kind of group keeps of a sequence, and what it can reuse. Table indices count blocks of tokens."""

    def table_len(self, num_tokens: int) -> int:
        """Table entries a sequence of this many tokens has."""

    def first_kept(self, num_computed: int) -> int:
        """Table entries before this one are not needed once `num_computed` tokens are computed."""

    def longest_hit(self, block_at: BlockAt, limit: int) -> int:
        """The largest number of leading blocks, at most `limit`, after which the sequence can go on."""

    def hit_table(self, block_at: BlockAt, num_blocks: int) -> list[int]:
        """The table of a sequence that reuses `num_blocks` leading blocks; 0 where none is needed."""

    def max_held(self, num_tokens: int, max_step_tokens: int) -> int:
        """Most blocks held at once while `num_tokens` tokens are computed in steps of at most `max_step_tokens`."""


@dataclass(frozen=True, slots=True)
class FullRules:
    """Every block is kept; any present prefix can be reused."""

    block_size: int

    def table_len(self, num_tokens: int) -> int:
        """One entry per started block."""
        return -(-num_tokens // self.block_size)

    def first_kept(self, num_computed: int) -> int:
        """Nothing is given back."""
        return 0

    def longest_hit(self, block_at: BlockAt, limit: int) -> int:
        """Up to the first missing block."""
        for index in range(limit):
            if block_at(index) is None:
                return index
        return limit

    def hit_table(self, block_at: BlockAt, num_blocks: int) -> list[int]:
        """All of the blocks."""
        return [_present(block_at(index)) for index in range(num_blocks)]

    def max_held(self, num_tokens: int, max_step_tokens: int) -> int:
        """All of the blocks."""
        return self.table_len(num_tokens)


@dataclass(frozen=True, slots=True)
class SlidingRules:
    """Blocks wholly outside the window are given back; reuse needs the window before the hit point only."""

    block_size: int
    window: int

    @property
    def window_blocks(self) -> int:
        """Blocks that hold the window - 1 tokens before a block boundary."""
        return -(-(self.window - 1) // self.block_size)

    def table_len(self, num_tokens: int) -> int:
        """One entry per started block, given back or not."""
        return -(-num_tokens // self.block_size)

    def first_kept(self, num_computed: int) -> int:
        """The block of the earliest token the next query sees."""
        return max(0, num_computed - self.window + 1) // self.block_size

    def longest_hit(self, block_at: BlockAt, limit: int) -> int:
        """The last place that enough present blocks, or the whole beginning, lead up to."""
        needed = self.window_blocks
        end, run = limit, 0
        for index in range(limit - 1, -1, -1):
            if run >= needed:
                return end
            if block_at(index) is None:
                end, run = index, 0
            else:
                run += 1
        return end

    def hit_table(self, block_at: BlockAt, num_blocks: int) -> list[int]:
        """The window's blocks, null before them."""
        first = max(0, num_blocks - self.window_blocks)
        return [0] * first + [_present(block_at(index)) for index in range(first, num_blocks)]

    def max_held(self, num_tokens: int, max_step_tokens: int) -> int:
        """The window, one step's tokens, and the parts of blocks at both ends."""
        spanning = -(-(self.window - 1 + max_step_tokens) // self.block_size) + 1
        return min(self.table_len(num_tokens), spanning)


@dataclass(frozen=True, slots=True)
class StateRules:
    """One block holds the current state; a saved state at the hit point is all that reuse needs."""

    block_size: int
    saves: bool
    """Whether states at block boundaries are left to the prefix cache, each move taking a second block."""
    num_rows: int = 1
    """Blocks per sequence: with drafts, one for the state after each token that a step may verify."""

    def table_len(self, num_tokens: int) -> int:
        """The current state, and room for those that a verification leaves."""
        return self.num_rows if num_tokens else 0

    def first_kept(self, num_computed: int) -> int:
        """The state is overwritten in place, never given back."""
        return 0

    def longest_hit(self, block_at: BlockAt, limit: int) -> int:
        """The last boundary with a saved state."""
        for index in range(limit - 1, -1, -1):
            if block_at(index) is not None:
                return index + 1
        return 0

    def hit_table(self, block_at: BlockAt, num_blocks: int) -> list[int]:
        """The saved state, to be copied before it is written."""
        return [_present(block_at(num_blocks - 1))] if num_blocks else []

    def max_held(self, num_tokens: int, max_step_tokens: int) -> int:
        """The table, and while the state moves on the block it is copied from."""
        return self.num_rows + self.saves


def rules_of(group: CacheGroup, block_size: int, *, caches_prefixes: bool, num_state_rows: int = 1) -> GroupRules:
    """The rules of a group's kind."""
    if group.kind is CacheKind.SLIDING:
        assert group.window is not None, "a sliding group has a window"
        return SlidingRules(block_size, group.window)
    if group.kind is CacheKind.STATE:
        return StateRules(block_size, caches_prefixes, num_state_rows)
    return FullRules(block_size)


def _present(block: int | None) -> int:
    assert block is not None, "a hit names present blocks only"
    return block
