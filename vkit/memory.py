"""How much of a card's memory a model takes beside its cache: measured by running its largest step once.

What is left of the share the engine may use is the cache's. The estimates made from a checkpoint's headers serve before
the weights are read, and on a CPU, where nobody measures peaks.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from vkit import kernels
from vkit.config import EngineArgs, EngineConfig
from vkit.facts import DeviceFacts, ModelFacts
from vkit.graphs import DecodeGraphs
from vkit.pool_size import size_pool
from vkit.sequence import Plan, ScheduledSequence, Sequence, SequenceStatus
from vkit.types import SamplingParams

logger = logging.getLogger("vkit.memory")

SLACK_BYTES = 256 << 20
"""Left free: torch's allocator holds memory in pieces, and the pieces do not always fit what is asked."""


class MemoryMeter(Protocol):
    """A device's memory."""

    def allocated(self) -> int:
        """Bytes of tensors that live now."""

    def reset_peak(self) -> None:
        """Forget the highest `allocated` so far."""

    def peak(self) -> int:
        """The highest `allocated` since `reset_peak`."""

    def reserved(self) -> int:
        """Bytes that torch holds of the device, in use or kept for later."""

    def used(self) -> int:
        """Bytes of the device that are taken, whoever took them."""

    def release(self) -> None:
        """Give back what torch keeps for later."""


class CudaMeter:
    """The current card's memory, by torch and by the driver."""

    def allocated(self) -> int:
        """Bytes of tensors that live now."""
        torch.cuda.synchronize()
        return int(torch.cuda.memory_allocated())

    def reset_peak(self) -> None:
        """Forget the highest `allocated` so far."""
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """The highest `allocated` since `reset_peak`."""
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated())

    def reserved(self) -> int:
        """Bytes that torch holds of the device, in use or kept for later."""
        return int(torch.cuda.memory_reserved())

    def used(self) -> int:
        """Bytes of the device that are taken, whoever took them."""
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def release(self) -> None:
        """Give back what torch keeps for later."""
        gc.collect()
        torch.cuda.empty_cache()


def meter_for(device: torch.device) -> MemoryMeter | None:
    """What measures this device's memory; None where nothing does."""
    return CudaMeter() if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes that are not the cache's."""

    weights: int
    activations: int
    """The peak of the largest step above what it began with."""
    graphs: int
    """Captured steps, those that are captured later included."""
    other: int
    """What libraries and the driver took since the start, beside torch's own memory."""

    @property
    def total(self) -> int:
        """All of them, and the slack."""
        return self.weights + self.activations + self.graphs + self.other + SLACK_BYTES

    def measured(self, facts: ModelFacts) -> ModelFacts:
        """What is known of the model, with measurements where there were estimates."""
        activations = self.total - self.weights
        ratio = activations / max(1, facts.num_activation_bytes)
        return facts.with_bytes(
            weights=self.weights,
            activations=activations,
            per_token=int(facts.activation_bytes_per_token * ratio),
            per_seq=int(facts.activation_bytes_per_seq * ratio),
        )


@dataclass(frozen=True, slots=True)
class PoolSizing:
    """What the size of the cache was decided from before the weights were read, to decide it again by measurement."""

    args: EngineArgs
    facts: ModelFacts
    device: DeviceFacts

    @property
    def used_bytes(self) -> int:
        """Bytes of the device that were taken when it was first looked at."""
        return self.device.total_bytes - self.device.available_bytes

    def resized(self, config: EngineConfig, profile: MemoryProfile) -> EngineConfig:
        """The configuration with the cache that fits beside what was measured.

        Raises:
            OutOfMemoryPreflight: none does.
        """
        pool = size_pool(
            self.args, profile.measured(self.facts), self.device, config.max_model_len, config.max_num_batched_tokens
        )
        for note in pool.notes:
            logger.warning("%s", note)
        if pool.num_blocks != config.num_blocks:
            logger.info("%d blocks of KV cache, as measured; %d were expected", pool.num_blocks, config.num_blocks)
        return replace(config, num_blocks=pool.num_blocks, max_model_len=pool.max_model_len)


class TrialRunner(Protocol):
    """The part of a runner that a profile needs; its cache is the null block alone."""

    graphs: DecodeGraphs | None

    @property
    def num_groups(self) -> int:
        """Groups of the cache."""

    def forward(self, plan: Plan) -> Tensor:
        """Logits of a step."""

    def close(self) -> None:
        """Let go of what was captured."""

    def capture_one(self, num_rows: int, max_seq_len: int) -> bool:
        """Capture one decoding step; False if it cannot be."""


def profile_memory(
    meter: MemoryMeter,
    make_runner: Callable[[], TrialRunner],
    *,
    used_before: int,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    samples: bool,
) -> MemoryProfile:
    """What a model takes whose weights are loaded: runs a full step, samples from it, captures two decoding steps.

    `used_before`: bytes of the device that were taken before the weights were read. `samples`: rows are logits.
    """
    meter.release()
    weights = meter.allocated()
    runner = make_runner()
    plan = largest_plan(runner.num_groups, block_size, max_num_batched_tokens, max_num_seqs, max_model_len)
    begin = meter.allocated()
    meter.reset_peak()
    logits = runner.forward(plan)
    if samples:
        exercise_sampler(logits)
    activations = meter.peak() - begin
    del logits
    graphs = _graph_bytes(meter, runner)
    other = max(0, meter.used() - meter.reserved() - used_before)
    runner.close()
    del runner
    meter.release()
    found = MemoryProfile(weights, activations, graphs, other)
    logger.info(
        "memory: weights %s, one step %s, captured steps %s, libraries %s",
        *(_gib(size) for size in (found.weights, found.activations, found.graphs, found.other)),
    )
    return found


def largest_plan(
    num_groups: int, block_size: int, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> Plan:
    """The largest step: the whole token budget, over as many sequences as may run, all of them in the null block."""
    num_tokens = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    num_seqs = min(max_num_seqs, num_tokens)
    share, rest = divmod(num_tokens, num_seqs)
    scheduled = []
    for index in range(num_seqs):
        count = share + (index < rest)
        sequence = Sequence(
            f"profile-{index}",
            [0] * count,
            count,
            SamplingParams(),
            0.0,
            status=SequenceStatus.RUNNING,
            block_ids=[[0] * math.ceil(count / block_size) for _ in range(num_groups)],
        )
        scheduled.append(ScheduledSequence(sequence, 0, count, 1, True))
    return Plan(0, scheduled)


def exercise_sampler(logits: Tensor) -> None:
    """Do what sampling does at most with logits (R, V): log-probabilities, a truncated draw, the largest."""
    num_rows = logits.shape[0]
    ones = [1.0] * num_rows
    rules = kernels.DrawRules.of(ones, [0.0] * num_rows, [0] * num_rows, [0.9] * num_rows, logits.device)
    raw = torch.log_softmax(logits.float(), dim=-1)
    rows = torch.arange(num_rows, device=logits.device)
    kernels.draw(logits.float(), rows, rules, torch.zeros_like(rows))
    kernels.largest_rows(raw)


def _graph_bytes(meter: MemoryMeter, runner: TrialRunner) -> int:
    """Bytes that all captured steps will take, by the largest and the next, which finds room in what the first left."""
    graphs = runner.graphs
    if graphs is None:
        return 0
    num_steps = len(graphs.sizes) * len(graphs.bounds)
    found = []
    for size in graphs.sizes[::-1][:2]:
        meter.release()
        before = meter.used()
        if not runner.capture_one(size, graphs.bounds[-1]):
            return 0
        meter.release()
        found.append(max(0, meter.used() - before))
    return found[0] + (num_steps - 1) * found[-1] if num_steps > 1 else found[0]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
