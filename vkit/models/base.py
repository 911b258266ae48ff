"""What every model is, and what it is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vkit import kernels
from vkit.batch import Batch
from vkit.cache.groups import LayerCacheSpec
from vkit.distributed import ALONE, Ranks
from vkit.errors import ModelLoadError
from vkit.layers import CacheOwner, LMHead, Module
from vkit.media import MediaInput, MediaProcessor
from vkit.models.hf_config import HFConfig
from vkit.models.media_context import MediaContext
from vkit.quantization import Weight


class DraftHead(Protocol):
    """A head that goes on from the model's hidden states."""

    def __call__(self, hidden: Tensor, batch: Batch, /) -> Tensor:
        """Hidden states (T, H) of the model, or of the head itself one token before; batch.token_ids are those of the
        tokens after them -> (T, H), of which compute_logits makes scores of the tokens after those."""


class ModelConfig(Protocol):
    """The part of the engine's configuration that shapes a model."""

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""

    @property
    def dtype(self) -> str:
        """Type of activations, by torch's name."""

    @property
    def kv_cache_dtype(self) -> str:
        """Type of cached keys and values, by torch's name."""

    @property
    def max_model_len(self) -> int:
        """Positions that can occur."""


class TensorInfo(Protocol):
    """What a checkpoint's header says about a tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as torch has it."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""


class ModelCheckpoint(Protocol):
    """The part of a checkpoint that models are built from (see vkit.loaders)."""

    @property
    def path(self) -> Any:
        """Where it lies."""

    @property
    def config(self) -> dict[str, Any]:
        """Keys of config.json."""

    @property
    def architecture(self) -> str:
        """Hugging Face class name."""

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""

    def tensor_names(self) -> Set[str]:
        """All tensors."""

    def tensor_info(self, name: str) -> TensorInfo:
        """Shape of a tensor; no weight byte is read."""

    def load(self, name: str) -> Weight:
        """A tensor, mapped where possible."""

    def release_pages(self) -> None:
        """Give back the memory of what was mapped; all of it stays valid."""


class CausalLM(Module):
    """A decoder with a head. Subclasses build `model` and `lm_head` in __init__ and may override the rest."""

    embeds = False
    """Whether the hidden states themselves are wanted, as embeddings; `compute_logits` then returns them."""
    ignored_tensors: tuple[str, ...] = ()
    """Regular expressions of tensor names that published files carry and nobody needs."""

    model: Callable[[Batch], Tensor]
    lm_head: LMHead
    num_layers: int
    num_head_layers = 0
    """Layers after the model's own that a draft head keeps something in."""
    mtp: DraftHead | None = None
    """Predicts a further token from a hidden state and the token after it; only where asked for."""

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        self.config = config
        self.options = options
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.ranks = ALONE
        """Who shares the model."""
        self._logits_multiplier = 1.0
        self._logits_cap: float | None = None

    def shard(self, ranks: Ranks) -> None:
        """The decoder and the head of one rank; towers are whole on each.

        Raises:
            CannotShare: so many ranks cannot share them.
        """
        self.ranks = ranks
        assert isinstance(self.model, Module), "the decoders of this house are modules"
        self.model.shard(ranks)
        self.lm_head.shard(ranks)

    def stored_name(self, name: str, stored: Set[str]) -> str:
        """How the checkpoint spells tensor `name`, given the names it has."""
        return name

    def cache_specs(self) -> list[LayerCacheSpec | None]:
        """What each layer keeps."""
        specs: list[LayerCacheSpec | None] = [None] * (self.num_layers + self.num_head_layers)
        cache_dtype: torch.dtype = getattr(torch, self.options.kv_cache_dtype)
        for _, module in self.walk():
            if isinstance(module, CacheOwner):
                specs[module.layer] = module.cache_spec(cache_dtype)
        return specs

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states (T, H) after the final norm."""
        return self.model(batch)

    def add_draft_head(self) -> None:
        """Give `mtp` the head that the checkpoint brings, to be loaded with the other weights.

        Raises:
            ModelLoadError: it brings none, or one that is not computed here.
        """
        raise ModelLoadError(f"{type(self).__name__}: no MTP head is known for this architecture")

    def media_processor(self, context: MediaContext) -> MediaProcessor | None:
        """How media are prepared for this model; None if it takes text only."""
        return None

    def encode_media(self, item: MediaInput) -> EncodedMedia:
        """What the tower makes of an item that `media_processor` prepared."""
        raise ValueError(f"{type(self).__name__} has no tower for {item.kind}")

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (R, H) -> logits (R, V) float32."""
        logits = self.lm_head(hidden).float()
        if self._logits_multiplier != 1.0:
            logits = kernels.scale(logits, self._logits_multiplier)
        return logits if self._logits_cap is None else kernels.soft_cap(logits, self._logits_cap)


@dataclass(frozen=True, slots=True)
class EncodedMedia:
    """What a tower made of one item."""

    embeddings: Tensor
    """(n, H): one row per prompt token that stands for the item."""
    features: tuple[Tensor, ...] = ()
    """(n, H) each: added to the stream after the first blocks, one per block."""


ModelClass = Callable[[HFConfig, ModelConfig], CausalLM]
ProgressCallback = Callable[[int, int], None]
"""(bytes done, bytes in all)"""
Weights = Mapping[str, Weight]
