"""What a method of drafting needs from checkpoints, checked before weights are read; then the drafter itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from vkit.cache.groups import CacheKind, LayerCacheSpec
from vkit.errors import UsageError
from vkit.layers import CacheOwner
from vkit.loaders import Checkpoint, open_checkpoint
from vkit.models import CausalLM, HFConfig, build_model, create_model
from vkit.models.base import ModelConfig
from vkit.speculation.draft_model import ModelDrafter
from vkit.speculation.drafter import Drafter
from vkit.speculation.mtp import MTPDrafter
from vkit.speculative_config import FLAG, SpeculativeSettings

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How a model is to be drafted for; no weight has been read."""

    settings: SpeculativeSettings
    """With the number of drafts decided."""
    checkpoint: Checkpoint | None = None
    """Of the draft model."""
    specs: tuple[LayerCacheSpec | None, ...] = ()
    """What the draft model's layers keep."""
    first_layer: int = 0
    """The number its first layer has behind the target's."""

    @property
    def num_drafts(self) -> int:
        """Most drafts per step."""
        assert self.settings.num_speculative_tokens is not None, "decided with the plan"
        return self.settings.num_speculative_tokens

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of the draft model as stored."""
        return self.checkpoint.num_weight_bytes if self.checkpoint is not None else 0

    @property
    def drafts_with_model(self) -> bool:
        """Whether anything runs beside the target."""
        return self.settings.method != "ngram"

    def build(self, target: CausalLM, config: ModelConfig) -> Drafter:
        """The drafter, its weights in memory.

        Raises:
            ModelLoadError: the weights cannot be read.
        """
        if self.checkpoint is None:
            return MTPDrafter(target, self.num_drafts, is_probabilistic=self.settings.is_probabilistic)
        model = build_model(self.checkpoint, config)
        for _, module in model.walk():
            if isinstance(module, CacheOwner):
                module.layer += self.first_layer
        return ModelDrafter(
            model, self.num_drafts, is_probabilistic=self.settings.is_probabilistic, device=config.device
        )

    def close(self) -> None:
        """Let go of the draft checkpoint."""
        if self.checkpoint is not None:
            self.checkpoint.close()


def has_draft_head(settings: SpeculativeSettings | None, checkpoint: Checkpoint) -> bool:
    """Whether the target is to be built with its head for further tokens.

    Raises:
        UsageError: it is, and the checkpoint has none.
    """
    if settings is None or settings.method != "mtp":
        return False
    if "mtp.fc.weight" not in checkpoint.tensor_names():
        raise UsageError(f"{FLAG}: method: mtp: {checkpoint.path} has no MTP head (tensor mtp.fc.weight)")
    return True


def plan_drafts(
    settings: SpeculativeSettings, checkpoint: Checkpoint, target: CausalLM, config: ModelConfig, *, use_mmap: bool
) -> DraftPlan:
    """The plan for a target that was built without weights.

    Raises:
        UsageError: the method cannot draft for this checkpoint.
        ModelLoadError: files of a draft checkpoint are missing, damaged or not supported.
    """
    if settings.method == "mtp":
        return DraftPlan(_for_head(settings, checkpoint))
    if settings.model is None:
        return DraftPlan(settings)
    draft = open_checkpoint(Path(settings.model), use_mmap=use_mmap)
    _check_vocabulary(draft, checkpoint)
    _check_context(draft, config)
    specs = create_model(draft, config).cache_specs()
    if any(spec is not None and spec.kind is CacheKind.STATE for spec in specs):
        raise UsageError(f"{FLAG}: model: {draft.path} has recurrent layers, which a draft model may not have")
    return DraftPlan(settings, draft, tuple(specs), target.num_layers + target.num_head_layers)


def _for_head(settings: SpeculativeSettings, checkpoint: Checkpoint) -> SpeculativeSettings:
    """The settings with the number of drafts decided."""
    num_layers = HFConfig(checkpoint.config).optional_integer("mtp_num_hidden_layers") or 1
    count = settings.num_speculative_tokens or num_layers
    if count > num_layers and count % num_layers:
        raise UsageError(
            f"{FLAG}: num_speculative_tokens: {count} is no multiple of the head's {num_layers} layers (n_predict)"
        )
    return replace(settings, num_speculative_tokens=count)


def _check_vocabulary(draft: Checkpoint, target: Checkpoint) -> None:
    sizes = [HFConfig(checkpoint.config).integer("vocab_size") for checkpoint in (draft, target)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{FLAG}: model: {draft.path} has a vocabulary of {sizes[0]}, the model one of {sizes[1]};"
            " drafts must be tokens of the same vocabulary"
        )


def _check_context(draft: Checkpoint, config: ModelConfig) -> None:
    limit = HFConfig(draft.config).optional_integer(*CONTEXT_KEYS)
    if limit is not None and limit < config.max_model_len:
        raise UsageError(
            f"{FLAG}: model: {draft.path} was made for {limit} tokens, the context is {config.max_model_len}",
            remedy=f"lower --max-model-len to {limit}",
        )
