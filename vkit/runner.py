"""Runs a model on plans: the only place that turns host state into tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vkit import kernels
from vkit.batch import Batch, BatchBuilder
from vkit.cache.store import TensorStore
from vkit.encoding import MediaEncoder, MediaStep
from vkit.models.base import CausalLM
from vkit.sequence import Plan, StateCopy


class RunnerConfig(Protocol):
    """The part of the engine's configuration that a runner needs."""

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""

    @property
    def block_size(self) -> int:
        """Token slots per block."""

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that run at a time."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """One step's tensors, the states to copy before it runs, and the media to encode."""

    batch: Batch
    state_copies: list[StateCopy]
    media: MediaStep


class Runner:
    """A model, its cache and the forward pass over both."""

    copies_states = True
    """Whether plans may ask for states to be copied, so that prefixes of recurrent models can be reused."""

    def __init__(self, model: CausalLM, config: RunnerConfig, num_blocks: int) -> None:
        self.model = model
        device = torch.device(config.device)
        specs = model.cache_specs()
        self.store = TensorStore(
            specs,
            num_blocks=num_blocks,
            block_size=config.block_size,
            device=device,
        )
        self._builder = BatchBuilder(
            self.store.groups,
            self.store,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            device=device,
        )
        self._media = MediaEncoder(model.encode_media, device)
        self._step = kernels.wrap_step(device.type, self._run)

    def prepare(self, plan: Plan) -> PreparedStep:
        """Everything of a step but its arithmetic; to be done before the next plan is made."""
        return PreparedStep(self._builder.build(plan), plan.state_copies, MediaEncoder.prepare(plan))

    @torch.inference_mode()
    def execute(self, step: PreparedStep) -> Tensor:
        """Logits (R, V) float32: `num_logits` rows of each scheduled sequence, in the plan's order.

        The tensor may be a buffer of the kernel backend: it holds until the step after next has begun.
        """
        for copy in step.state_copies:
            self.store.copy_block(copy.group, copy.source, copy.target)
        batch = step.batch
        batch.media = self._media.run(step.media)
        if batch.media is not None or batch.axis_positions is not None:
            return self._run(batch)  # recorded steps know tokens alone
        return self._step(batch)

    def forward(self, plan: Plan) -> Tensor:
        """`execute` of `prepare`."""
        return self.execute(self.prepare(plan))

    def _run(self, batch: Batch) -> Tensor:
        hidden = self.model.forward(batch)
        return self.model.compute_logits(kernels.embedding(batch.logits_rows, hidden))
