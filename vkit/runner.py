"""Runs a model on plans: the only place that turns host state into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from vkit import kernels
from vkit.batch import Batch, BatchBuilder
from vkit.cache.connector import TransferReport, WorkerSide
from vkit.cache.groups import LayerCacheSpec
from vkit.cache.store import TensorStore
from vkit.decode_inputs import DecodeShape
from vkit.encoding import MediaEncoder, MediaStep
from vkit.graphs import DecodeGraphs, Recorder, default_sizes
from vkit.layers import ActiveAdapters, AdapterSwitch, AdapterWeights
from vkit.models.base import CausalLM
from vkit.sampled import SampledTokens
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


@runtime_checkable
class AdapterWithWeights(Protocol):
    """A low-rank adapter as the runner needs it."""

    @property
    def weights(self) -> AdapterWeights:
        """Per linear layer, its two matrices."""


@dataclass(frozen=True, slots=True)
class CapturedBatch:
    """A step whose tensors lie where a captured pass reads them."""

    shape: DecodeShape
    num_rows: int
    """Rows that are no padding."""


@dataclass(frozen=True, slots=True)
class ChosenAdapters:
    """Which adapters a step runs with."""

    by_token: ActiveAdapters = ()
    by_logits_row: ActiveAdapters = ()


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """One step's tensors, the states to copy before it runs, and the media to encode."""

    batch: Batch | CapturedBatch
    state_copies: list[StateCopy]
    media: MediaStep
    adapters: ChosenAdapters
    """Which tokens and logits belong to which adapter."""
    connector_meta: Any = None


class Runner:
    """A model, its cache and the forward pass over both."""

    copies_states = True
    """Whether plans may ask for states to be copied, so that prefixes of recurrent models can be reused."""

    def __init__(
        self,
        model: CausalLM,
        config: RunnerConfig,
        num_blocks: int,
        adapters: AdapterSwitch | None = None,
        worker: WorkerSide | None = None,
        *,
        drafter: Drafter | None = None,
        draft_specs: Sequence[LayerCacheSpec | None] = (),
        recorder: Recorder | None = None,
        capture_sizes: Sequence[int] = (),
        is_eager: bool = False,
    ) -> None:
        """`adapters`: what the model's linear layers listen to, where requests may choose adapters.

        `worker` moves cache entries for a connector. `draft_specs`: what the drafter's own layers keep, which are
        numbered after the model's. `recorder` captures decoding steps, of `capture_sizes` rows or those of
        `graphs.default_sizes`, unless there is a drafter. `is_eager`: every step runs op by op, nothing is recorded.
        """
        self.model = model
        self._worker = worker
        self._adapters = adapters
        self._device = device = torch.device(config.device)
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
        # A recorded step hands out its logits alone, and does not come back for the sums of several ranks.
        records = not needs_streams and not is_eager and model.ranks.size == 1
        self._step = kernels.wrap_step(device.type, self._run) if records else self._run
        self.graphs: DecodeGraphs | None = None
        # With a drafter nearly every step verifies drafts, and what it drafts from is the batch of a step run op by op.
        if recorder is not None and records and drafter is None:
            sizes = capture_sizes or default_sizes(config.max_num_seqs)
            self._builder.reserve_decode_inputs(max(sizes))
            self.graphs = DecodeGraphs(
                self._run, self._builder.padded, recorder, sizes=sizes, max_model_len=config.max_model_len
            )
        self._pages = {
            f"layers.{layer}": slab
            for group in self.store.groups
            for slab, layer in zip(self.store.slabs, group.layers, strict=False)
        }
        if worker is not None:
            worker.register_kv_caches(self._pages)

    def prepare(self, plan: Plan, sampled: SampledTokens | None = None) -> PreparedStep:
        """Everything of a step but its arithmetic; to be done before the next plan is made.

        `sampled`: what the step before sampled, where the plan names tokens that the host does not know yet.
        """
        adapters = _chosen_adapters(plan, self._device) if self._adapters is not None else ChosenAdapters()
        batch = self._prepare_batch(plan, sampled, is_plain=not adapters.by_token)
        return PreparedStep(batch, plan.state_copies, MediaEncoder.prepare(plan), adapters, plan.connector_meta)

    def _prepare_batch(self, plan: Plan, sampled: SampledTokens | None, *, is_plain: bool) -> Batch | CapturedBatch:
        shape = self.graphs.shape_for(plan) if self.graphs is not None and is_plain else None
        if shape is None or not self._is_captured(shape):
            return self._builder.build(plan, sampled)
        self._builder.fill_decode_inputs(plan, shape.num_rows, sampled)
        return CapturedBatch(shape, len(plan.scheduled))

    def _is_captured(self, shape: DecodeShape) -> bool:
        """Whether a replay serves this shape, which is captured now if it is the first of its kind."""
        assert self.graphs is not None
        if self.graphs.has(shape):
            return True
        self._builder.fill_decode_inputs(Plan(0, []), shape.num_rows)
        return self.graphs.capture(shape)

    def capture(self) -> None:
        """Capture decoding steps now, before the first request comes; nothing where there is nothing to capture."""
        if self.graphs is not None:
            self._builder.fill_decode_inputs(Plan(0, []), self.graphs.sizes[-1])
            self.graphs.capture_all()

    def capture_one(self, num_rows: int, max_seq_len: int) -> bool:
        """Capture one decoding step; False if it cannot be, or if nothing is captured here."""
        return self.graphs is not None and self._is_captured(DecodeShape(num_rows, max_seq_len))

    @property
    def num_groups(self) -> int:
        """Groups of the cache."""
        return len(self.store.groups)

    def close(self) -> None:
        """Let go of captured steps, which hold memory of the device, and of what holds this runner in turn.

        Cache and model then go with the last reference: in a program, which freezes what it started with
        (`vkit.starting`), no walk of the cycle collector would ever find them.
        """
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
        self._step = _closed

    def execute(self, step: PreparedStep) -> Tensor:
        """Logits (R, V) float32: `num_logits` rows of each scheduled sequence, in the plan's order.

        The tensor may be a buffer of the kernel backend: it holds until the step after next has begun.
        """
        for copy in step.state_copies:
            self.store.copy_block(copy.group, copy.source, copy.target)
        if self._worker is None:
            return self._pass(step)
        self._load(step.connector_meta)
        logits = self._pass(step)
        self._save()
        return logits

    def exchange(self, meta: Any) -> None:
        """Load and store what a connector's `meta` asks for, without a step."""
        self._load(meta)
        self._save()

    def transfer_report(self) -> TransferReport:
        """What became of loads and sends since the last call."""
        assert self._worker is not None, "only asked where there is a connector"
        sent, received = self._worker.get_finished()
        return TransferReport(sent, received, self._worker.get_block_ids_with_load_errors())

    def _load(self, meta: Any) -> None:
        """The whole pass may be one native call, so every layer's entries must be there before it."""
        assert self._worker is not None
        self._worker.start_load_kv(meta)
        for name in self._pages:
            self._worker.wait_for_layer_load(name)

    def _save(self) -> None:
        assert self._worker is not None
        for name, pages in self._pages.items():
            self._worker.save_kv_layer(name, pages)
        self._worker.wait_for_save()

    def _pass(self, step: PreparedStep) -> Tensor:
        media = self._media.run(step.media)
        if isinstance(step.batch, CapturedBatch):
            assert self.graphs is not None, "what was prepared for a replay runs before the runner is closed"
            return self.graphs.run(step.batch.shape, step.batch.num_rows)
        batch = step.batch
        batch.media = media
        if self.drafter is not None:
            batch.taps = dict.fromkeys(self.drafter.tapped_layers)
            self._observed = batch, torch.empty(0), []
        if step.adapters.by_token:
            return self._run_adapted(batch, step.adapters)
        if batch.media is not None or batch.axis_positions is not None or batch.state_targets is not None:
            return self._run(batch)  # recorded steps know tokens alone, and one state per sequence
        return self._step(batch)

    def _run_adapted(self, batch: Batch, adapters: ChosenAdapters) -> Tensor:
        """A pass in which layers add what adapters say; unrecorded, since which rows they are changes."""
        assert self._adapters is not None
        self._adapters.active, self._adapters.active_logits = adapters.by_token, adapters.by_logits_row
        try:
            return self._run(batch)
        finally:
            self._adapters.active = self._adapters.active_logits = ()

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


def _closed(batch: Batch) -> Tensor:
    raise AssertionError("a runner that was closed runs no steps")


def _chosen_adapters(plan: Plan, device: torch.device) -> ChosenAdapters:
    """The tokens and logits rows of each adapter that the plan's sequences run with; empty when none does."""
    tokens: dict[str, list[range]] = {}
    logits: dict[str, list[range]] = {}
    weights: dict[str, AdapterWeights] = {}
    token = row = 0
    for item in plan.scheduled:
        adapter = item.sequence.adapter
        if adapter is not None:
            assert isinstance(adapter, AdapterWithWeights)
            weights[adapter.key] = adapter.weights
            tokens.setdefault(adapter.key, []).append(range(token, token + item.num_tokens))
            logits.setdefault(adapter.key, []).append(range(row, row + item.num_logits))
        token, row = token + item.num_tokens, row + item.num_logits

    def with_rows(places: dict[str, list[range]], num_rows: int) -> list[tuple[Tensor | None, AdapterWeights]]:
        found: list[tuple[Tensor | None, AdapterWeights]] = []
        for key, ranges in places.items():
            index = [place for part in ranges for place in part]
            if index:
                found.append((None if len(index) == num_rows else torch.tensor(index, device=device), weights[key]))
        return found

    return ChosenAdapters(with_rows(tokens, token), with_rows(logits, row))
