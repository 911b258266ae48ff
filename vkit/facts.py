"""What settings depend on: a model and a device, in numbers. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Device = Literal["cpu", "cuda"]
BLOCK_SIZE_MULTIPLE = 16
"""Tokens per block come in multiples of this."""


@dataclass(frozen=True, slots=True)
class CacheGroupFacts:
    """What one group of layers keeps, as far as sizing needs to know."""

    kind: str
    """"full", "sliding" or "state", as `vkit.cache.groups.CacheKind`."""
    num_layers: int
    bytes_per_unit: int
    """Bytes one layer keeps per token (full, sliding) or per sequence (state)."""
    window: int | None = None
    granule: int = 1
    """Tokens that one entry spans; a block that may be shared holds whole entries."""
    num_states: int = 1
    """States one sequence keeps at a time (state)."""

    def page_bytes(self, block_size: int) -> int:
        """Bytes one layer needs in one block."""
        return self.bytes_per_unit if self.kind == "state" else self.bytes_per_unit * block_size

    def blocks_for(self, num_tokens: int, block_size: int, token_budget: int) -> int:
        """Most blocks one sequence of `num_tokens` ever holds at a time."""
        if self.kind == "state":
            return self.num_states
        whole = math.ceil(num_tokens / block_size)
        if self.window is None:
            return whole
        # While a chunk runs, its own tokens and the window before its first one are held; both ends may be mid-block.
        return min(whole, math.ceil((self.window - 1 + token_budget) / block_size) + 1)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a checkpoint's header says, as far as settings depend on it. Nothing here needs a weight byte."""

    name: str
    architecture: str
    format: str
    """"safetensors" or "gguf"."""
    dtype: str
    """The checkpoint's own dtype; for quantised weights the one to compute in."""
    max_model_len: int
    """The model's context limit in tokens."""
    num_weight_bytes: int
    cache_groups: tuple[CacheGroupFacts, ...]
    is_moe: bool = False
    media_kinds: tuple[str, ...] = ()
    """The kinds of media it takes: "image", "video", "audio"."""
    num_activation_bytes: int = 0
    """Peak of one step at the token budget; an estimate before loading, a measurement after a profile run."""
    activation_bytes_per_token: int = 0
    """What of the estimate one token of the budget adds."""
    activation_bytes_per_seq: int = 0
    """What of the estimate one running sequence adds."""

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block id: every slab holds the largest page (see docs/architecture.md, memory of the cache)."""
        if not self.cache_groups:
            return 0
        page = max(group.page_bytes(block_size) for group in self.cache_groups)
        return page * max(group.num_layers for group in self.cache_groups)

    def block_size_for(self, asked: int) -> int:
        """Tokens per block: `asked`, or as many more as fill the page that a recurrent layer's state takes.

        States and tokens share pages of one size; a smaller block would leave most of each page empty. Blocks also hold
        whole entries, where an entry spans several tokens.
        """
        multiple = math.lcm(1, *(group.granule for group in self.cache_groups))
        asked = math.ceil(asked / multiple) * multiple
        states = [group.bytes_per_unit for group in self.cache_groups if group.kind == "state"]
        tokens = [group.bytes_per_unit for group in self.cache_groups if group.kind != "state"]
        if not states or not tokens:
            return asked
        filled = math.ceil(max(states) / max(tokens))
        multiple = math.lcm(multiple, BLOCK_SIZE_MULTIPLE)
        return max(asked, math.ceil(filled / multiple) * multiple)

    def blocks_for(self, num_tokens: int, block_size: int, token_budget: int) -> int:
        """Blocks one sequence of `num_tokens` needs, over all groups, without the null block."""
        return sum(group.blocks_for(num_tokens, block_size, token_budget) for group in self.cache_groups)

    def with_bytes(self, *, weights: int, activations: int, per_token: int, per_seq: int) -> ModelFacts:
        """The same model, with other sizes in memory."""
        return replace(
            self,
            num_weight_bytes=weights,
            num_activation_bytes=activations,
            activation_bytes_per_token=per_token,
            activation_bytes_per_seq=per_seq,
        )

    @property
    def is_full_attention_only(self) -> bool:
        """Whether every layer that keeps anything keeps every token."""
        return all(group.kind == "full" for group in self.cache_groups)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the chosen device offers. Memory is measured before the first weight is read."""

    kind: Device
    total_bytes: int
    available_bytes: int
    num_threads: int
    """Host threads this process may use (affinity and container quota respected)."""
    dtypes: frozenset[str] = frozenset({"float32", "bfloat16"})
    """Dtypes the device computes in at speed; `--dtype auto` picks among these."""
