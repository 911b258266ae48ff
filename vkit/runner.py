"""Runs a model on plans: the only place that turns host state into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vkit import kernels
from vkit.batch import Batch, BatchBuilder
from vkit.cache.groups import LayerCacheSpec
from vkit.cache.store import TensorStore
from vkit.encoding import MediaEncoder, MediaStep
from vkit.models.base import CausalLM
from vkit.sequence import Plan, StateCopy, StepSamples
from vkit.speculation.drafter import Drafter, ObservedStep
from vkit.speculation.proposer import Drafts


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

    def __init__(
        self,
        model: CausalLM,
        config: RunnerConfig,
        num_blocks: int,
        *,
        drafter: Drafter | None = None,
        draft_specs: Sequence[LayerCacheSpec | None] = (),
    ) -> None:
        """`draft_specs`: what the drafter's own layers keep, which are numbered after the model's."""
        self.model = model
        device = torch.device(config.device)
        specs = [*model.cache_specs(), *draft_specs]
        self.drafter = drafter
        self._observed: tuple[Batch, Tensor, list[Tensor]] | None = None
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
        needs_streams = drafter is not None and (drafter.needs_hidden or drafter.tapped_layers)
        # A recorded step hands out its logits alone.
        self._step = self._run if needs_streams else kernels.wrap_step(device.type, self._run)

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
        if self.drafter is not None:
            batch.taps = dict.fromkeys(self.drafter.tapped_layers)
            self._observed = batch, torch.empty(0), []
        if batch.media is not None or batch.axis_positions is not None:
            return self._run(batch)  # recorded steps know tokens alone
        return self._step(batch)

    def forward(self, plan: Plan) -> Tensor:
        """`execute` of `prepare`."""
        return self.execute(self.prepare(plan))

    @torch.inference_mode()
    def draft(self, plan: Plan, samples: StepSamples) -> list[Drafts]:
        """Drafts for each item of the plan that was executed last, before it is booked."""
        assert self.drafter is not None, "asked of a runner with a drafter"
        assert self._observed is not None, "asked after a step"
        batch, hidden, taps = self._observed
        self._observed = None
        return self.drafter.draft(ObservedStep(plan.scheduled, samples.token_ids, batch, hidden, taps), self._builder)

    def _run(self, batch: Batch) -> Tensor:
        hidden = self.model.forward(batch)
        if self._observed is not None and self._observed[0] is batch:
            self._observed = batch, hidden, [tap for tap in (batch.taps or {}).values() if tap is not None]
        return self.model.compute_logits(kernels.embedding(batch.logits_rows, hidden))
