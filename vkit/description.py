"""What a model is, and what it needs, from its headers alone."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from vkit.cache.groups import LayerCacheSpec, group_layers
from vkit.config import EngineArgs, resolve_dtype, resolve_kv_cache_dtype
from vkit.device import Device
from vkit.distributed import Ranks
from vkit.errors import UsageError
from vkit.facts import CacheGroupFacts, DeviceFacts, ModelFacts
from vkit.layers import Experts
from vkit.loaders import open_checkpoint
from vkit.loaders.checkpoint import Checkpoint
from vkit.loaders.mmproj import ProjectedCheckpoint
from vkit.loaders.quantizing import ExpandedCheckpoint, quantized_as
from vkit.media import MediaProcessor
from vkit.models import HFConfig, MediaContext, create_model
from vkit.models.base import CausalLM
from vkit.models.hf_config import CONTEXT_KEYS
from vkit.models.offload import OffloadPlan, plan_offload
from vkit.parallel.launch import Launch
from vkit.speculation.checkpoints import DraftPlan, has_draft_head, plan_drafts
from vkit.text.tokenizer import Tokenizer
from vkit.weight_offload import ExpertCacheSize, OffloadConfig

logger = logging.getLogger("vkit")

DEFAULT_CONTEXT = 2048
"""Context limit of a model whose configuration names none."""

_TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


class _FileSettings(Protocol):
    """Which files to read, and how."""

    @property
    def model(self) -> str:
        """The checkpoint."""

    @property
    def mmproj(self) -> str | None:
        """A tower's file."""

    @property
    def quantization(self) -> str | None:
        """What the weights must be stored as."""

    @property
    def hf_overrides(self) -> Mapping[str, Any] | str | None:
        """Keys of config.json to replace."""

    @property
    def no_mmap(self) -> bool:
        """Whether files are read instead of mapped."""

    @property
    def gguf_dequantize(self) -> bool:
        """Whether GGUF blocks are expanded."""


def open_files(settings: _FileSettings, dtype_of: Callable[[Checkpoint], str]) -> Checkpoint:
    """The checkpoint as it will be read, headers checked. `dtype_of`: the dtype that a checkpoint is computed in.

    Raises:
        CheckpointError, ModelLoadError: a file is missing, damaged, or of a kind that cannot be computed.
        UsageError: what was asked for is not what the files hold.
    """
    use_mmap = not settings.no_mmap
    checkpoint = quantized_as(open_checkpoint(Path(settings.model), use_mmap=use_mmap), settings.quantization)
    if settings.mmproj is not None:
        checkpoint = ProjectedCheckpoint(checkpoint, Path(settings.mmproj), use_mmap=use_mmap)
    overrides = settings.hf_overrides
    if isinstance(overrides, Mapping):
        if unknown := sorted(overrides.keys() - checkpoint.config.keys()):
            logger.warning("--hf-overrides: the checkpoint's config has no %s; added as given", ", ".join(unknown))
        checkpoint.config.update(overrides)
    if settings.gguf_dequantize and checkpoint.format == "gguf":
        checkpoint = ExpandedCheckpoint(checkpoint, getattr(torch, dtype_of(checkpoint)))
    return checkpoint


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is known of a model without its weights."""

    facts: ModelFacts
    """What settings depend on."""
    specs: list[LayerCacheSpec | None]
    """What each layer caches, those of a drafter last."""
    drafting: DraftPlan | None


def describe_model(checkpoint: Checkpoint, args: EngineArgs, device: Device) -> ModelDescription:
    """The description of a model; no weight byte is read.

    Raises:
        ModelLoadError: the architecture is not computed here, or its configuration contradicts itself.
        UsageError: tokens cannot be drafted as asked.
    """
    provisional = _provisional(args, checkpoint, device)
    ranks = Ranks(0, args.tensor_parallel_size)
    has_head = has_draft_head(args.speculation, checkpoint)
    model = create_model(checkpoint, provisional, has_draft_head=has_head, ranks=ranks)
    drafting = None
    specs = model.cache_specs()
    if args.speculation is not None:
        drafting = plan_drafts(args.speculation, checkpoint, model, provisional, use_mmap=not args.no_mmap)
        specs += drafting.specs
    facts = _model_facts(checkpoint, args, specs, drafting)
    offload, experts = args.offload_config, args.moe_expert_cache
    if isinstance(offload, OffloadConfig) or isinstance(experts, ExpertCacheSize):
        assert offload is None or isinstance(offload, OffloadConfig)
        assert experts is None or isinstance(experts, ExpertCacheSize)
        plan = offload_plan_of(model, checkpoint, offload, experts)
        facts = dataclasses.replace(facts, num_weight_bytes=max(0, facts.num_weight_bytes - plan.saved_bytes))
    return ModelDescription(facts, specs, drafting)


def offload_plan_of(
    model: CausalLM, checkpoint: Checkpoint, offload: OffloadConfig | None, experts: ExpertCacheSize | None
) -> OffloadPlan:
    """Which weights stay out of memory.

    Raises:
        UsageError: there is nothing of what was asked to be kept out.
    """
    top_k = HFConfig(checkpoint.config).optional_integer(*_TOP_K_KEYS)
    if experts is not None and top_k is None:
        if not any(isinstance(module, Experts) for _, module in model.walk()):
            raise UsageError(
                f"--moe-expert-cache: {checkpoint.name} has no routed experts", remedy="leave the flag out"
            )
        raise UsageError(f"--moe-expert-cache: {checkpoint.name} does not say how many experts a token chooses")
    return plan_offload(model, checkpoint, offload, experts, top_k or 1)


def media_processor_of(
    checkpoint: Checkpoint, args: EngineArgs, device: Device, tokenizer: Tokenizer
) -> MediaProcessor | None:
    """How the model takes media; None if it takes text only."""
    context = MediaContext(
        checkpoint.preprocessor_config("image"),
        checkpoint.preprocessor_config("video"),
        tokenizer.token_text,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.token_id,
    )
    return create_model(checkpoint, _provisional(args, checkpoint, device)).media_processor(context)


def check_num_devices(args: EngineArgs, device: Device, launch: Launch | None) -> None:
    """Raises:
    UsageError: fewer cards on this host than ranks.
    """
    size = args.tensor_parallel_size if launch is None else launch.local_size
    if args.tensor_parallel_size == 1 or device.kind != "cuda":
        return
    if torch.cuda.device_count() < size:
        raise UsageError(
            f"--tensor-parallel-size: {size} ranks on this host need as many cards, {torch.cuda.device_count()} found"
        )


@dataclass(frozen=True, slots=True)
class _Provisional:
    """Enough of a configuration to ask a model what it caches."""

    device: str
    dtype: str
    kv_cache_dtype: str
    max_model_len: int


def _provisional(args: EngineArgs, checkpoint: Checkpoint, device: Device) -> _Provisional:
    facts, own = device_facts(device), checkpoint_dtype(checkpoint)
    dtype, cache_dtype = resolve_dtype(args.dtype, own, facts), resolve_kv_cache_dtype(args, own, facts)
    return _Provisional(device.kind, dtype, cache_dtype, args.max_model_len or _context_limit(checkpoint))


def device_facts(device: Device) -> DeviceFacts:
    """What settings depend on, of a device."""
    return DeviceFacts(
        kind="cuda" if device.kind == "cuda" else "cpu",
        total_bytes=device.total_bytes,
        available_bytes=device.available_bytes,
        num_threads=device.num_threads,
        dtypes=device.dtypes,
    )


def _model_facts(
    checkpoint: Checkpoint, args: EngineArgs, specs: list[LayerCacheSpec | None], drafting: DraftPlan | None
) -> ModelFacts:
    groups = []
    num_states = 1 + (drafting.num_drafts if drafting is not None else 0)
    for group in group_layers(specs):
        units = [spec.bytes_per_unit for spec in (specs[layer] for layer in group.layers) if spec is not None]
        granule = max(spec.granule for spec in (specs[layer] for layer in group.layers) if spec is not None)
        sizes = (str(group.kind), len(group.layers), max(units), group.window, granule, num_states)
        groups.append(CacheGroupFacts(*sizes))
    config = HFConfig(checkpoint.config)
    num_experts = config.optional_integer(*_EXPERT_KEYS)
    per_token, per_seq = _activation_bytes(config)
    return ModelFacts(
        name=checkpoint.name,
        architecture=checkpoint.architecture,
        format=checkpoint.format,
        dtype=checkpoint_dtype(checkpoint),
        max_model_len=_context_limit(checkpoint),
        num_weight_bytes=checkpoint.num_weight_bytes // args.tensor_parallel_size
        + (drafting.num_weight_bytes if drafting is not None else 0),
        cache_groups=tuple(groups),
        is_moe=num_experts is not None and num_experts > 1,
        num_activation_bytes=(args.max_num_batched_tokens or 2048) * per_token + args.max_num_seqs * per_seq,
        activation_bytes_per_token=per_token,
        activation_bytes_per_seq=per_seq,
    )


def _activation_bytes(config: HFConfig) -> tuple[int, int]:
    """An estimate of one step's peak, per token and per sequence: ten hidden states and two MLP widths; the logits."""
    hidden = config.integer("hidden_size", "n_embd", default=0)
    intermediate = config.integer("intermediate_size", "n_inner", default=4 * hidden)
    vocabulary = config.integer("vocab_size", default=0)
    return 4 * (10 * hidden + 2 * intermediate), 4 * 2 * vocabulary


def _context_limit(checkpoint: Checkpoint) -> int:
    return HFConfig(checkpoint.config).integer(*CONTEXT_KEYS, default=DEFAULT_CONTEXT)


def share_of(device: DeviceFacts, args: EngineArgs, launch: Launch | None) -> DeviceFacts:
    """What one rank has of a device: its own card, or a part of the memory and threads of a host that ranks share."""
    num_ranks = args.tensor_parallel_size if launch is None else launch.local_size
    if num_ranks == 1 or device.kind != "cpu":
        return device
    return dataclasses.replace(
        device,
        total_bytes=device.total_bytes // num_ranks,
        available_bytes=device.available_bytes // num_ranks,
        num_threads=max(1, device.num_threads // num_ranks),
    )


def checkpoint_dtype(checkpoint: Checkpoint) -> str:
    """What the checkpoint's values are; a GGUF file of packed weights says nothing, and is no float32 file."""
    default = "bfloat16" if checkpoint.format == "gguf" else "float32"
    return HFConfig(checkpoint.config).text("dtype", "torch_dtype", default=default).removeprefix("torch.")
