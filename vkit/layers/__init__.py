"""Building blocks of models, over `vkit.kernels` alone: modules know shapes and names, kernels know devices."""

from __future__ import annotations

from vkit.layers.adapted import (
    ActiveAdapters,
    AdapterSwitch,
    AdapterTarget,
    AdapterWeights,
    NamedHead,
    adapt,
    adapter_targets,
)
from vkit.layers.attention import Attention, CacheOwner
from vkit.layers.decoder import (
    Decoder,
    DecoderLayer,
    FeedForward,
    Mixer,
    ParallelLayer,
    PostNormLayer,
    PreNormLayer,
    SandwichLayer,
    Stream,
    with_media,
)
from vkit.layers.delta_net import CausalConv, DeltaShape, GatedDeltaNet, KimiDeltaAttention
from vkit.layers.embedding import Embedding, LMHead, PositionEmbedding
from vkit.layers.latent_attention import LatentAttention, LatentShape
from vkit.layers.linear import ACTIVATIONS, Activation, GatedMLP, Linear, MergedLinear, PlainMLP
from vkit.layers.mamba import Mamba2, MambaShape
from vkit.layers.media_attention import attention_with_runs
from vkit.layers.module import Module, Placement, TensorSlot
from vkit.layers.moe import Experts, MoE, Router, Routing, SharedExpertMoE
from vkit.layers.norm import LayerNorm, Norm, RMSNorm
from vkit.layers.rotary import MultiAxisRotary, RopeSpec, RotaryEmbedding, yarn_mscale

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "ActiveAdapters",
    "AdapterSwitch",
    "AdapterTarget",
    "AdapterWeights",
    "Attention",
    "CacheOwner",
    "CausalConv",
    "Decoder",
    "DecoderLayer",
    "DeltaShape",
    "Embedding",
    "Experts",
    "FeedForward",
    "GatedDeltaNet",
    "GatedMLP",
    "KimiDeltaAttention",
    "LMHead",
    "LatentAttention",
    "LatentShape",
    "LayerNorm",
    "Linear",
    "Mamba2",
    "MambaShape",
    "MergedLinear",
    "Mixer",
    "MoE",
    "Module",
    "MultiAxisRotary",
    "NamedHead",
    "Norm",
    "ParallelLayer",
    "Placement",
    "PlainMLP",
    "PositionEmbedding",
    "PostNormLayer",
    "PreNormLayer",
    "RMSNorm",
    "RopeSpec",
    "RotaryEmbedding",
    "Router",
    "Routing",
    "SandwichLayer",
    "SharedExpertMoE",
    "Stream",
    "TensorSlot",
    "adapt",
    "adapter_targets",
    "attention_with_runs",
    "with_media",
    "yarn_mscale",
]
