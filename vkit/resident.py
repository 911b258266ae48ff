"""A model with its weights and its cache in memory, as the engine and the other ranks use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vkit import kernels
from vkit.adapters import let_listen
from vkit.cache.connector import TransferReport, WorkerSide
from vkit.config import EngineConfig
from vkit.description import offload_plan_of, open_files
from vkit.device import return_device_memory
from vkit.distributed import ALONE, Ranks
from vkit.errors import InvalidRequest, UsageError
from vkit.graphs import recorder_for
from vkit.layers import AdapterSwitch
from vkit.layers.streaming import FileReader
from vkit.loaders.checkpoint import Checkpoint
from vkit.memory import MemoryMeter, MemoryProfile, PoolSizing, meter_for, profile_memory
from vkit.models import build_model
from vkit.models.base import CausalLM
from vkit.models.offload import apply_offload
from vkit.runner import PreparedStep, Runner
from vkit.sampled import SampledTokens
from vkit.sequence import Plan, StepSamples
from vkit.speculation.checkpoints import DraftPlan, has_draft_head
from vkit.speculation.drafter import Drafter
from vkit.speculation.proposer import Drafts

ProgressCallback = Callable[[int, int], None]
"""(bytes loaded, bytes in all)"""


class ResidentModel:
    """The model and its runner while they are in memory, and the way back when they are not."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        progress: ProgressCallback | None,
        worker: WorkerSide | None = None,
        drafting: DraftPlan | None = None,
        ranks: Ranks = ALONE,
        sizing: PoolSizing | None = None,
    ) -> None:
        """`worker` moves cache entries for a connector. `drafting`: how tokens are drafted, if they are. `ranks`: who
        shares the model. `sizing`: how the cache is sized anew once it is measured what else takes memory."""
        self._ranks = ranks
        self._checkpoint = checkpoint
        self._config = config
        self._worker = worker
        self._drafting = drafting
        self._drafter: Drafter | None = None
        self._reader: FileReader | None = None
        self._switch = AdapterSwitch() if config.enable_lora else None
        self._model: CausalLM | None = self._build(progress)
        meter = meter_for(torch.device(config.device)) if sizing is not None else None
        if meter is not None and sizing is not None:
            self._config = sizing.resized(config, self._profile(meter, sizing.used_bytes))
        self._runner: Runner | None = self._new_runner()

    def _build(self, progress: ProgressCallback | None = None) -> CausalLM:
        config, drafting = self._config, self._drafting
        has_head = has_draft_head(config.speculation, self._checkpoint)
        model = build_model(self._checkpoint, config, progress, has_draft_head=has_head, ranks=self._ranks)
        if config.offload_config is not None or config.moe_expert_cache is not None:
            plan = offload_plan_of(model, self._checkpoint, config.offload_config, config.moe_expert_cache)
            self._reader = apply_offload(model, self._checkpoint, plan)
        if self._switch is not None:
            let_listen(model, self._switch)
        if drafting is not None and drafting.drafts_with_model:
            self._drafter = drafting.build(model, config, is_eager=config.enforce_eager)
        return model

    copies_states = Runner.copies_states

    @property
    def config(self) -> EngineConfig:
        """The configuration, with the cache as it came out."""
        return self._config

    def _profile(self, meter: MemoryMeter, used_before: int) -> MemoryProfile:
        config = self._config
        assert self._model is not None, "weights come before the profile"
        return profile_memory(
            meter,
            lambda: self._make_runner(num_blocks=1, worker=None),
            used_before=used_before,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            samples=not self._model.embeds,
        )

    def _new_runner(self) -> Runner:
        runner = self._make_runner(self._config.num_blocks, self._worker)
        runner.capture()
        return runner

    def _make_runner(self, num_blocks: int, worker: WorkerSide | None) -> Runner:
        assert self._model is not None, "weights come before the cache"
        config = self._config
        specs = self._drafting.specs if self._drafting is not None else ()
        captures = not config.enforce_eager and not self._model.embeds
        return Runner(
            self._model,
            config,
            num_blocks,
            self._switch,
            worker,
            drafter=self._drafter,
            draft_specs=specs,
            recorder=recorder_for(torch.device(config.device)) if captures else None,
            capture_sizes=config.cudagraph_capture_sizes,
            is_eager=config.enforce_eager,
        )

    def draft(self, plan: Plan, samples: StepSamples) -> list[Drafts]:
        """Drafts for each item of the step that was run last."""
        assert self._runner is not None, "a sleeping model runs no steps"
        return self._runner.draft(plan, samples)

    def prepare(self, plan: Plan, sampled: SampledTokens | None = None) -> PreparedStep:
        """Host work of a step. `sampled`: where the tokens are that only the device knows."""
        assert self._runner is not None, "a sleeping model runs no steps"
        return self._runner.prepare(plan, sampled)

    def execute(self, step: PreparedStep) -> Tensor:
        """Logits (R, V) float32 of a prepared step."""
        assert self._runner is not None, "a sleeping model runs no steps"
        return self._runner.execute(step)

    def exchange(self, meta: Any) -> None:
        """Let a cache connector work without a step."""
        assert self._runner is not None, "a sleeping model moves no cache entries"
        self._runner.exchange(meta)

    def transfer_report(self) -> TransferReport:
        """What became of a connector's loads and sends."""
        assert self._runner is not None, "a sleeping model moves no cache entries"
        return self._runner.transfer_report()

    def sleep(self, level: int) -> None:
        """Give up the cache; at level 2, and wherever weights are not in host memory anyway, the weights."""
        self._drop_runner()
        if level == 2 or self._config.device != "cpu":
            self._drafter = None
            self._drop_model()
        return_device_memory(torch.device(self._config.device))

    def wake_up(self, tags: frozenset[str]) -> None:
        """Bring back "weights", "kv_cache" or both. The cache needs the weights first."""
        if self._model is None and "weights" in tags:
            self._model = self._build()
        if self._runner is None and "kv_cache" in tags:
            if self._model is None:
                raise InvalidRequest("tags: the weights must be woken before, or with, the kv_cache", param="tags")
            self._runner = self._new_runner()

    def close(self) -> None:
        """Free everything."""
        self._drop_runner()
        self._drafter = None
        self._drop_model()
        return_device_memory(torch.device(self._config.device))
        self._checkpoint.close()
        if self._drafting is not None:
            self._drafting.close()

    def _drop_runner(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _drop_model(self) -> None:
        self._model = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def configure_kernels(config: EngineConfig) -> None:
    """Give torch and the kernels of the device their threads and precision.

    Raises:
        UsageError: results that do not depend on the batch were asked for, and there are no kernels that give them.
    """
    if config.deterministic and not kernels.usable_backends("cpu"):
        raise UsageError(
            "--deterministic: plain torch sums in another order for another batch",
            remedy="vkit doctor says what is missing",
        )
    torch.set_num_threads(config.threads)
    kernels.configure(
        config.device,
        num_threads=config.threads,
        is_exact=config.cpu_precision == "exact",
        is_deterministic=config.deterministic,
    )


def open_share(config: EngineConfig, ranks: Ranks) -> ResidentModel:
    """A rank's share of a model that rank 0 has checked, in memory.

    Raises:
        ModelLoadError: files missing or damaged on this rank's host.
    """
    configure_kernels(config)
    return ResidentModel(open_files(config, lambda _: config.dtype), config, None, ranks=ranks)
