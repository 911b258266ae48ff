"""Runs a model on plans: the only place that turns host state into tensors."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vkit import kernels
from vkit.batch import Batch, BatchBuilder
from vkit.cache.store import TensorStore
from vkit.models.base import CausalLM
from vkit.sequence import Plan


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


class Runner:
    """A model, its cache and the forward pass over both."""

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
        self._step = kernels.wrap_step(device.type, self._run)

    @torch.inference_mode()
    def forward(self, plan: Plan) -> Tensor:
        """Logits (R, V) float32: `num_logits` rows of each scheduled sequence, in the plan's order."""
        for copy in plan.state_copies:
            self.store.copy_block(copy.group, copy.source, copy.target)
        return self._step(self._builder.build(plan))

    def _run(self, batch: Batch) -> Tensor:
        hidden = self.model.forward(batch)
        return self.model.compute_logits(kernels.embedding(batch.logits_rows, hidden))
