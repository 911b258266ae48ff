"""Decoders that embed: no head, the hidden states are the result. Pooling them is the engine's business.

Checkpoints name their tensors with or without the `model.` in front.
"""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor

from vkit.distributed import Ranks
from vkit.errors import ModelLoadError
from vkit.layers import LMHead, TensorSlot
from vkit.models.base import CausalLM, ModelConfig
from vkit.models.hf_config import HFConfig
from vkit.models.llama import LlamaForCausalLM, MistralForCausalLM
from vkit.models.qwen2 import Qwen2ForCausalLM
from vkit.models.qwen3 import Qwen3ForCausalLM


class NoHead(LMHead):
    """Takes no tensors: hidden states stay what they are."""

    def __init__(self) -> None:
        super().__init__(0, 0)

    def shard(self, ranks: Ranks) -> None:
        """Nothing to share."""

    def slots(self) -> list[TensorSlot]:
        """None."""
        return []

    def set_tensors(self, tensors: object, placement: object) -> None:
        """Nothing to take."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden (R, H), unchanged."""
        return hidden


class Embedder(CausalLM):
    """What an embedding model has that its text sibling does not."""

    embeds = True
    ignored_tensors = (r"lm_head\.weight",)

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        if not config.flag("is_causal", default=True) or config.flag("use_bidirectional_attention", default=False):
            raise ModelLoadError("config.json: an embedding model with bidirectional attention is not supported")
        self.lm_head = NoHead()

    def stored_name(self, name: str, stored: Set[str]) -> str:
        """How the checkpoint spells tensor `name`."""
        bare = name.removeprefix("model.")
        return bare if bare in stored else name

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (R, H) as float32."""
        return hidden.float()


class LlamaModel(Embedder, LlamaForCausalLM):
    """Llama as a model of embeddings."""


class MistralModel(Embedder, MistralForCausalLM):
    """Mistral as a model of embeddings."""


class Qwen2Model(Embedder, Qwen2ForCausalLM):
    """Qwen 2 as a model of embeddings."""


class Qwen3Model(Embedder, Qwen3ForCausalLM):
    """Qwen 3 as a model of embeddings."""
