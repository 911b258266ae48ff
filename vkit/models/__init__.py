"""Architecture name -> model class, imported on demand; and building a model from a checkpoint.

Other distributions add architectures through the entry-point group `vkit.models` (name: the architecture; value: the
class), or by calling `register_model`.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from vkit.distributed import ALONE, Ranks
from vkit.errors import ModelLoadError
from vkit.models.base import CausalLM, ModelCheckpoint, ModelClass, ModelConfig, ProgressCallback
from vkit.models.hf_config import HFConfig
from vkit.models.loading import check_tensors, load_weights
from vkit.models.media_context import MediaContext
from vkit.models.sharding import check_shared, shard_model

ENTRY_POINT_GROUP = "vkit.models"

BUILTIN_MODELS: dict[str, str] = {
    "Cohere2ForCausalLM": "cohere",
    "CohereForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeLiteForCausalLM": "deepseek",
    "GraniteForCausalLM": "granite",
    "InternLM2ForCausalLM": "internlm2",
    "InternLM3ForCausalLM": "llama",
    "KimiLinearForCausalLM": "kimi_linear",
    "LagunaForCausalLM": "laguna",
    "LlamaForCausalLM": "llama",
    "LlamaModel": "embedding",
    "MiniCPM3ForCausalLM": "minicpm3",
    "MiniCPMForCausalLM": "minicpm",
    "MistralForCausalLM": "llama",
    "MistralModel": "embedding",
    "MixtralForCausalLM": "mixtral",
    "MuseGlimmerForCausalLM": "muse_glimmer",
    "MuseGlimmerForConditionalGeneration": "muse_glimmer",
    "NemotronHForCausalLM": "nemotron_h",
    "OPTForCausalLM": "opt",
    "Olmo2ForCausalLM": "olmo",
    "Olmo3ForCausalLM": "olmo",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2Model": "embedding",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3",
    "Qwen3Model": "embedding",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "StableLmForCausalLM": "stablelm",
}
"""Architecture -> module of this package that defines a class of that name."""

_IS_DRAFT = "it proposes tokens for another model and answers nothing by itself"

KNOWN_BUT_REFUSED: dict[str, str] = {
    "DFlashDraftModel": _IS_DRAFT,
    "DeepseekV32ForCausalLM": "it is too large to be checked here",
    "Dots3NoteForCausalLM": "it is too large to be checked here",
    "Gemma3ForConditionalGeneration": "its vision tower has no description here; Gemma3ForCausalLM checkpoints run",
    "GlmMoeDsaForCausalLM": "it is too large to be checked here",
    "KimiK3ForConditionalGeneration": "its published files describe tensors, not how they are computed",
    "MiniMaxM2ForCausalLM": "it is too large to be checked here",
    "Qwen3VLMoeForConditionalGeneration": "nothing is here to check its experts against; the dense Qwen3-VL runs",
    "Qwen3DSparkModel": _IS_DRAFT,
    "Qwen3_5MTP": _IS_DRAFT,
    "Qwen3_5MoeMTP": _IS_DRAFT,
}
"""Architectures that people will bring and that nothing here computes -> why."""

SPEECH_MODELS = ("ParakeetForCTC", "ParakeetForRNNT", "ParakeetForTDT")
"""Architectures that hear instead of read (see vkit.speech)."""

_registered: dict[str, ModelClass] = {}


def register_model(architecture: str, model_class: ModelClass) -> None:
    """Serve `architecture` with `model_class`; a registered class wins over a built-in one."""
    _registered[architecture] = model_class


def known_architectures() -> list[str]:
    """Every architecture that can be built, in alphabetical order."""
    plugged = (point.name for point in entry_points(group=ENTRY_POINT_GROUP))
    return sorted({*BUILTIN_MODELS, *_registered, *plugged})


def model_class(architecture: str) -> ModelClass:
    """The class for an architecture.

    Raises:
        ModelLoadError: nobody knows it; lists what is known.
    """
    if architecture in _registered:
        return _registered[architecture]
    if architecture in BUILTIN_MODELS:
        module = importlib.import_module(f"{__name__}.{BUILTIN_MODELS[architecture]}")
        found: ModelClass = getattr(module, architecture)
        return found
    for point in entry_points(group=ENTRY_POINT_GROUP, name=architecture):
        plugged: ModelClass = point.load()
        return plugged
    if architecture in SPEECH_MODELS:
        raise ModelLoadError(
            f"architecture {architecture!r} is a speech model, which reads no text",
            remedy="use vkit transcribe, or vkit serve and /v1/audio/transcriptions",
        )
    if architecture in KNOWN_BUT_REFUSED:
        reason = KNOWN_BUT_REFUSED[architecture]
        raise ModelLoadError(f"architecture {architecture!r} is known but not computed: {reason}")
    raise ModelLoadError(
        f"architecture {architecture!r} is not supported", remedy=f"known: {', '.join(known_architectures())}"
    )


def create_model(
    checkpoint: ModelCheckpoint, config: ModelConfig, *, has_draft_head: bool = False, ranks: Ranks = ALONE
) -> CausalLM:
    """The model without weights: enough for `cache_specs` and for checking the tensor list. Costs no memory.

    `has_draft_head`: with the head that predicts further tokens (`CausalLM.mtp`). `ranks`: who shares it.

    Raises:
        ModelLoadError: unknown architecture, or a configuration it cannot be built from.
        UsageError: so many ranks cannot share it.
    """

    def make() -> CausalLM:
        return model_class(checkpoint.architecture)(HFConfig(checkpoint.config), config)

    if ranks.size > 1:
        check_shared(checkpoint.architecture)
        return shard_model(make, ranks)
    model = make()
    if has_draft_head:
        model.add_draft_head()
    return model


def build_model(
    checkpoint: ModelCheckpoint,
    config: ModelConfig,
    progress: ProgressCallback | None = None,
    *,
    has_draft_head: bool = False,
    ranks: Ranks = ALONE,
) -> CausalLM:
    """The model with its weights; of a model that ranks share, this rank's.

    Raises:
        ModelLoadError: as `create_model`.
        CheckpointError: tensors missing, misshapen or unknown.
    """
    model = create_model(checkpoint, config, has_draft_head=has_draft_head, ranks=ranks)
    load_weights(model, checkpoint, progress)
    return model


__all__ = [
    "BUILTIN_MODELS",
    "ENTRY_POINT_GROUP",
    "KNOWN_BUT_REFUSED",
    "SPEECH_MODELS",
    "CausalLM",
    "HFConfig",
    "MediaContext",
    "build_model",
    "check_tensors",
    "create_model",
    "known_architectures",
    "load_weights",
    "model_class",
    "register_model",
]
