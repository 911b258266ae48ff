"""Which architectures ranks can share, and how a model becomes one rank's share."""

from __future__ import annotations

from collections.abc import Callable

from vkit.distributed import CannotShare, Ranks
from vkit.errors import UsageError
from vkit.models.base import CausalLM

SHARED_ARCHITECTURES = frozenset(
    {
        *("Cohere2ForCausalLM", "CohereForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        *("GPT2LMHeadModel", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma4ForConditionalGeneration"),
        *("Gemma4UnifiedForConditionalGeneration", "GemmaForCausalLM", "Glm4ForCausalLM", "Glm4MoeLiteForCausalLM"),
        *("GraniteForCausalLM", "InternLM2ForCausalLM", "InternLM3ForCausalLM", "KimiLinearForCausalLM"),
        *("LagunaForCausalLM", "LlamaForCausalLM", "LlamaModel", "MiniCPM3ForCausalLM", "MiniCPMForCausalLM"),
        *("MistralForCausalLM", "MistralModel", "MixtralForCausalLM", "MuseGlimmerForCausalLM"),
        *("MuseGlimmerForConditionalGeneration", "NemotronHForCausalLM", "OPTForCausalLM", "Olmo2ForCausalLM"),
        *("Olmo3ForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        *("Qwen2Model", "Qwen3Model"),
        *("Qwen3MoeForCausalLM", "Qwen3VLForConditionalGeneration", "Qwen3_5ForCausalLM"),
        *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        "StableLmForCausalLM",
    }
)
"""Those whose shared results are checked against recorded ones."""
SIZES_TRIED = range(2, 17)
"""Numbers of ranks that are looked through for those that would do."""


def check_shared(architecture: str) -> None:
    """Raises:
    UsageError: this architecture is not shared by ranks here.
    """
    if architecture not in SHARED_ARCHITECTURES:
        raise UsageError(
            f"--tensor-parallel-size: {architecture} cannot be shared by several ranks here",
            remedy="leave the flag out, or use a model of another architecture",
        )


def shard_model(make: Callable[[], CausalLM], ranks: Ranks) -> CausalLM:
    """A new model, as the rank has it.

    Raises:
        CannotShare: so many ranks cannot share it; names the numbers that could.
    """
    model = make()
    try:
        model.shard(ranks)
    except CannotShare as error:
        possible = [str(size) for size in SIZES_TRIED if _can_share(make, size)]
        remedy = f"of 2 to {SIZES_TRIED[-1]} ranks, {', '.join(possible) or 'none'} would do"
        raise UsageError(error.message, remedy=remedy) from None
    return model


def _can_share(make: Callable[[], CausalLM], size: int) -> bool:
    try:
        make().shard(Ranks(0, size))
    except CannotShare:
        return False
    return True
