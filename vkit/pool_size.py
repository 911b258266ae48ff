"""How many KV blocks to make, and what to say when they do not fit. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from vkit.errors import OutOfMemoryPreflight, UsageError
from vkit.facts import DeviceFacts, ModelFacts
from vkit.weight_offload import FLAG as OFFLOAD_FLAG

DEFAULT_NUM_BLOCKS = 256
DEFAULT_MEMORY_UTILIZATION = 0.92
DEFAULT_BLAME_CONTEXT = 2048
"""Tokens of context that must fit beside what a flag asks for, for a value of it to be advised."""


class PoolSettings(Protocol):
    """What was asked of the pool and of steps: the flags of these names."""

    @property
    def num_blocks(self) -> int | None:
        """Blocks asked for; 0: as many as a share of memory holds."""

    @property
    def kv_cache_memory(self) -> int | None:
        """Bytes asked for."""

    @property
    def gpu_memory_utilization(self) -> float | None:
        """Share of the device's memory that weights, activations and cache may fill."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence asked for."""

    @property
    def max_num_seqs(self) -> int:
        """Most sequences of a step."""

    @property
    def max_num_batched_tokens(self) -> int | None:
        """Most tokens of a step asked for."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A decided pool and the context it serves."""

    num_blocks: int
    max_model_len: int
    notes: tuple[str, ...] = ()


def size_pool(
    args: PoolSettings, model: ModelFacts, device: DeviceFacts, max_model_len: int, token_budget: int
) -> PoolSize:
    """How many KV blocks to make, in the order --num-blocks, --kv-cache-memory, share of memory, 256.

    Raises:
        UsageError: a byte budget smaller than two blocks, or an explicit pool too small for an explicit length.
        OutOfMemoryPreflight: the pool does not fit beside the weights.
    """
    sizing = _Sizing(args, model, device, max_model_len, token_budget)
    if args.num_blocks:
        return sizing.from_explicit(args.num_blocks, f"--num-blocks {args.num_blocks}")
    if args.kv_cache_memory is not None:
        return sizing.from_explicit(sizing.blocks_in(args.kv_cache_memory), f"--kv-cache-memory {args.kv_cache_memory}")
    if args.gpu_memory_utilization is not None or args.num_blocks == 0:
        return sizing.from_share(args.gpu_memory_utilization or DEFAULT_MEMORY_UTILIZATION)
    return sizing.from_default()


@dataclass(frozen=True, slots=True)
class _Sizing:
    """One pool-sizing question."""

    args: PoolSettings
    model: ModelFacts
    device: DeviceFacts
    max_model_len: int
    token_budget: int

    @property
    def block_size(self) -> int:
        return self.model.block_size_for(self.args.block_size)

    @property
    def bytes_per_block(self) -> int:
        return self.model.bytes_per_block(self.block_size)

    @property
    def used_bytes(self) -> int:
        """Bytes gone before the first KV block."""
        return self.model.num_weight_bytes + self.model.num_activation_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Pool size that holds one sequence of `num_tokens`, the null block included."""
        return 1 + self.model.blocks_for(num_tokens, self.block_size, self.token_budget)

    def longest_in(self, num_blocks: int) -> int:
        """Longest sequence a pool of `num_blocks` holds, up to max_model_len; 0 if none."""
        low, high = 0, self.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_for(middle) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def blocks_in(self, num_bytes: int) -> int:
        """Blocks that a byte budget pays for."""
        per_block = self.bytes_per_block
        if per_block == 0:
            return self.blocks_for(self.max_model_len)
        num_blocks = num_bytes // per_block
        if num_blocks < 2:  # one to use beside the null block
            raise UsageError(
                f"--kv-cache-memory: {num_bytes} bytes are less than the {2 * per_block} that the two smallest blocks"
                f" need ({per_block} each)"
            )
        return num_blocks

    def from_explicit(self, num_blocks: int, source: str) -> PoolSize:
        """A pool whose size the user gave; it must fit in what is available now."""
        if self.used_bytes + num_blocks * self.bytes_per_block > self.device.available_bytes:
            raise self.does_not_fit(num_blocks)
        return self.fitted(num_blocks, source)

    def from_share(self, share: float) -> PoolSize:
        """A pool that fills the given share of the device's memory."""
        self._check_free(share)
        per_block = self.bytes_per_block
        if per_block == 0:
            return PoolSize(self.blocks_for(self.max_model_len), self.max_model_len)
        num_blocks = max(0, self.bytes_under(share)) // per_block
        if num_blocks < 2:
            raise self.does_not_fit(self.blocks_for(self.max_model_len), share)
        return self.fitted(num_blocks, f"{share:g} of the {self.device.kind} memory")

    def _check_free(self, share: float) -> None:
        """Refuse to fill a share of a card that others hold part of: the cache would be smaller than was asked for."""
        device, asked = self.device, int(self.device.total_bytes * share)
        if device.kind == "cpu" or self.args.gpu_memory_utilization is None or device.available_bytes >= asked:
            return
        fits = math.floor(100 * device.available_bytes / device.total_bytes) / 100
        taken = device.total_bytes - device.available_bytes
        raise OutOfMemoryPreflight(
            f"--gpu-memory-utilization {share:g}: {_gib(asked)} of {_gib(device.total_bytes)} are asked for,"
            f" {_gib(device.available_bytes)} are free; other processes hold {_gib(taken)}",
            remedy=f"--gpu-memory-utilization {fits:g} would fit, or end what else runs on the card",
        )

    def from_default(self) -> PoolSize:
        """256 blocks, or what one sequence of max_model_len needs if that is more and fits."""
        wanted = max(DEFAULT_NUM_BLOCKS, self.blocks_for(self.max_model_len))
        per_block = self.bytes_per_block
        if per_block == 0:
            return PoolSize(wanted, self.max_model_len)
        limit = max(0, self.bytes_under(DEFAULT_MEMORY_UTILIZATION)) // per_block
        if limit < 2:
            raise self.does_not_fit(wanted, DEFAULT_MEMORY_UTILIZATION)
        return self.fitted(min(wanted, limit), f"the {self.device.kind} memory")

    def bytes_under(self, share: float) -> int:
        """Bytes left for KV blocks when the whole machine may be filled up to `share`."""
        taken_by_others = self.device.total_bytes - self.device.available_bytes
        return int(self.device.total_bytes * share) - taken_by_others - self.used_bytes

    def fitted(self, num_blocks: int, source: str) -> PoolSize:
        """The pool, with max_model_len lowered to what it holds when the length was the model's own."""
        if self.blocks_for(self.max_model_len) <= num_blocks:
            return PoolSize(num_blocks, self.max_model_len)
        fits = self.longest_in(num_blocks)
        if self.args.max_model_len or fits < 2:  # one token of prompt, one of completion
            raise self.too_small(num_blocks, fits, source)
        note = (
            f"context lowered from {self.max_model_len} to {fits} tokens, which is what {source} holds"
            f" ({num_blocks} KV blocks of {self.block_size}); --max-model-len, --num-blocks or"
            " --kv-cache-memory change it"
        )
        return PoolSize(num_blocks, fits, (note,))

    def too_small(self, num_blocks: int, fits: int, source: str) -> OutOfMemoryPreflight:
        return OutOfMemoryPreflight(
            f"one sequence of {self.max_model_len} tokens needs {self.blocks_for(self.max_model_len)} KV blocks of"
            f" {self.block_size}; {source} gives {num_blocks}",
            remedy=f"--max-model-len {fits} would fit" if fits >= 2 else "raise --num-blocks or --kv-cache-memory",
        )

    def does_not_fit(self, num_blocks: int, share: float = 1.0) -> OutOfMemoryPreflight:
        """The error that says needed and available per part, and the longest context that would fit."""
        per_block = self.bytes_per_block
        blame = self.blamed(share)
        left = self.bytes_under(share) if share < 1.0 else self.device.available_bytes - self.used_bytes
        fits = self.longest_in(max(0, left) // per_block) if per_block else 0
        leave = f"leave weights in the file with {OFFLOAD_FLAG}, " if self.device.kind == "cpu" else ""
        remedy = (
            f"--max-model-len {fits} would fit, with --num-blocks {self.blocks_for(fits)}"
            if fits >= 2
            else f"free memory, {leave}or use a smaller or more strongly quantised model"
        )
        cause = ""
        if blame is not None:
            cause, remedy = f"{blame[0]} {blame[1]}: ", f"{blame[0]} {blame[2]} would fit"
        return OutOfMemoryPreflight(
            f"{cause}{self.model.name} does not fit in {self.device.kind} memory:"
            f" weights {_gib(self.model.num_weight_bytes)}"
            f" + activations {_gib(self.model.num_activation_bytes)} + KV cache {_gib(num_blocks * per_block)}"
            f" ({num_blocks} blocks) are needed, {_gib(self.device.available_bytes)} of"
            f" {_gib(self.device.total_bytes)} are available",
            remedy=remedy,
        )

    def blamed(self, share: float) -> tuple[str, str, str] | None:
        """(flag, value given, value that fits) of the one flag without which it would fit; None if there is none."""
        args, model = self.args, self.model
        least_cache = self.blocks_for(min(self.max_model_len, DEFAULT_BLAME_CONTEXT)) * self.bytes_per_block
        room = self.bytes_under(share) + self.used_bytes - model.num_weight_bytes - least_cache
        seq_bytes = args.max_num_seqs * model.activation_bytes_per_seq
        token_bytes = model.num_activation_bytes - seq_bytes
        if args.max_num_batched_tokens and token_bytes >= seq_bytes and model.activation_bytes_per_token:
            fits = (room - seq_bytes) // model.activation_bytes_per_token
            if args.max_num_seqs <= fits < args.max_num_batched_tokens:
                return "--max-num-batched-tokens", str(args.max_num_batched_tokens), str(fits)
        if model.activation_bytes_per_seq:
            fits = (room - token_bytes) // model.activation_bytes_per_seq
            if 1 <= fits < args.max_num_seqs:
                return "--max-num-seqs", str(args.max_num_seqs), str(fits)
        if args.gpu_memory_utilization is not None:
            missing = max(0, model.num_activation_bytes - room)
            hundredths = math.ceil(100 * (share + missing / self.device.total_bytes))
            if missing and hundredths <= 100:
                return "--gpu-memory-utilization", f"{share:g}", f"{hundredths / 100:g}"
        return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
