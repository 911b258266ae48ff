"""What a method of drafting needs from checkpoints, checked before weights are read; then the drafter itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from vkit.cache.groups import CacheKind, LayerCacheSpec
from vkit.errors import UsageError
from vkit.layers import CacheOwner
from vkit.loaders import Checkpoint, open_checkpoint
from vkit.models import CausalLM, HFConfig, build_model, check_tensors, create_model, load_weights
from vkit.models.base import ModelConfig
from vkit.speculation.dflash import BlockDraft, BlockDrafter, check_target, width_of
from vkit.speculation.draft_model import ModelDrafter
from vkit.speculation.drafter import Drafter
from vkit.speculation.mtp import MTPDrafter
from vkit.speculative_config import FLAG, METHODS_OF_TOKENS, SpeculativeSettings

BLOCK_METHODS = {"dflash": ("DFlashDraftModel",), "dspark": ("Qwen3DSparkModel", "DSparkDraftModel")}
"""Methods that draft a block at once, and the architectures of their drafts."""
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
    def num_lookahead(self) -> int:
        """Slots that are written beyond a step's tokens."""
        return self.num_drafts + (self.settings.method == "dflash")

    @property
    def drafts_with_model(self) -> bool:
        """Whether anything runs beside the target."""
        return self.settings.method not in METHODS_OF_TOKENS

    def build(self, target: CausalLM, config: ModelConfig, *, is_eager: bool = False) -> Drafter:
        """The drafter, its weights in memory. `is_eager`: it records nothing.

        Raises:
            ModelLoadError: the weights cannot be read.
        """
        if self.checkpoint is None:
            return MTPDrafter(target, self.num_drafts, is_probabilistic=self.settings.is_probabilistic)
        if self.settings.method in BLOCK_METHODS:
            block = _block_draft(self.settings, self.checkpoint, target, config)
            load_weights(block, self.checkpoint)
            self._number_layers(block)
            return BlockDrafter(block, self.num_drafts)
        model = build_model(self.checkpoint, config)
        self._number_layers(model)
        return ModelDrafter(
            model,
            self.num_drafts,
            is_probabilistic=self.settings.is_probabilistic,
            device=config.device,
            is_eager=is_eager,
        )

    def _number_layers(self, model: CausalLM) -> None:
        """Count the draft's layers on from the target's, in whose cache they keep theirs."""
        for _, module in model.walk():
            if isinstance(module, CacheOwner):
                module.layer += self.first_layer

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
    if settings.method in BLOCK_METHODS:
        model: CausalLM = _block_draft(settings, draft, target, config)
        check_tensors(model, draft)
    else:
        model = create_model(draft, config)
    specs = model.cache_specs()
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


def _block_draft(settings: SpeculativeSettings, draft: Checkpoint, target: CausalLM, config: ModelConfig) -> BlockDraft:
    """A draft of blocks without its weights; its own configuration says of which kind it is."""
    lanes = BLOCK_METHODS[settings.method]
    values = HFConfig(draft.config)
    kind = values.text("model_type", default="qwen3")
    is_known = draft.architecture in lanes and (draft.architecture == "Qwen3DSparkModel" or kind == "qwen3")
    if not is_known:
        raise UsageError(
            f"{FLAG}: model: {draft.path}: a draft of architecture {draft.architecture} and model_type {kind} is not"
            f" built for {settings.method}",
            remedy=f"known: {', '.join(lanes)} with model_type qwen3",
        )
    vocab_size = values.integer("vocab_size")
    if values.integer("draft_vocab_size", default=vocab_size) != vocab_size:
        raise UsageError(f"{FLAG}: model: {draft.path} has a reduced vocabulary, which is not built")
    model = BlockDraft(values, config, target, has_markov_head=settings.method == "dspark", stored=draft.tensor_names())
    check_target(target, model.tapped_layers)
    target_width, width = width_of(target), values.integer("hidden_size")
    if width != target_width:
        raise UsageError(
            f"{FLAG}: model: {draft.path} is {width} wide, the model whose embedding it uses {target_width}"
        )
    count = settings.num_speculative_tokens or 0
    if settings.method == "dflash" and count > model.block_size:
        raise UsageError(f"{FLAG}: num_speculative_tokens: {count} is above the draft's block size {model.block_size}")
    if settings.method == "dspark" and count < model.block_size:
        raise UsageError(f"{FLAG}: num_speculative_tokens: {count} is below the draft's block size {model.block_size}")
    return model


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
