"""Building blocks of models, over `vkit.kernels` alone: modules know shapes and names, kernels know devices."""

from __future__ import annotations

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
)
from vkit.layers.embedding import Embedding, LMHead, PositionEmbedding
from vkit.layers.linear import ACTIVATIONS, Activation, GatedMLP, Linear, MergedLinear, PlainMLP
from vkit.layers.latent_attention import LatentAttention, LatentShape
from vkit.layers.module import Module, Placement, TensorSlot
from vkit.layers.moe import Experts, MoE, Router, Routing, SharedExpertMoE
from vkit.layers.norm import LayerNorm, Norm, RMSNorm
from vkit.layers.rotary import RopeSpec, RotaryEmbedding, yarn_mscale

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Attention",
    "CacheOwner",
    "Decoder",
    "DecoderLayer",
    "Embedding",
    "Experts",
    "FeedForward",
    "GatedMLP",
    "LMHead",
    "LatentAttention",
    "LatentShape",
    "LayerNorm",
    "Linear",
    "MergedLinear",
    "Mixer",
    "MoE",
    "Module",
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
    "yarn_mscale",
]
