"""What converters did to weights on the way into a GGUF file, undone. Knows no files and no names.

A transform says beforehand what shape it will give, so that a contradiction with the configuration shows on opening.
Source: GGUF specification, conversion of rope order; Llama and Gemma checkpoints as published.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vkit.quantization import BlockWeight, QuantizedTensor

Shape = tuple[int, ...]
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Transform:
    """`apply` turns the file's weight into the Hugging Face one; `shape` its shape, or raises ValueError.

    `dtype` is what `apply` always returns, or None if it keeps the weight's type or packing. `copies` says that the
    result shares no memory with the argument. `forward` is what a converter does: a dense Hugging Face weight to the
    file's, of shape `forward_shape`.
    """

    apply: Callable[[BlockWeight, Config], BlockWeight]
    forward: Callable[[torch.Tensor, Config], torch.Tensor]
    shape: Callable[[Shape, Config], Shape] = lambda shape, config: shape
    forward_shape: Callable[[Shape, Config], Shape] = lambda shape, config: shape
    dtype: torch.dtype | None = None
    copies: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `start` to `start + length` of a weight, under a name of their own; `is_row`: its only row, as a vector."""

    hf_base: str
    start: int
    length: int
    is_row: bool = False


Split = Callable[[str, Shape, Config], list[Part]]
"""(Hugging Face base name of the whole, its shape, config) -> the parts it becomes; raises ValueError."""


def half_split_rows(heads_key: str) -> Transform:
    """Rows from interleaved rope order (pairs 2j, 2j+1 of a head) to half-split order (j, j + D/2).

    `heads_key` is the configuration key of the number of heads.
    """

    def shape(shape: Shape, config: Config) -> Shape:
        num_heads = config[heads_key]
        if not shape or shape[0] % (2 * num_heads):
            raise ValueError(f"{list(shape)} cannot be cut into {num_heads} heads of even size")
        return shape

    def apply(weight: BlockWeight, config: Config) -> BlockWeight:
        num_rows = weight.shape[0]
        order = torch.arange(num_rows).view(config[heads_key], -1, 2).transpose(1, 2).reshape(-1)
        return weight.rows(order) if isinstance(weight, QuantizedTensor) else weight.index_select(0, order)

    def forward(weight: torch.Tensor, config: Config) -> torch.Tensor:
        order = torch.arange(weight.shape[0]).view(config[heads_key], 2, -1).transpose(1, 2).reshape(-1)
        return weight.index_select(0, order)

    return Transform(apply, forward, shape, copies=True)


def _minus_one(weight: BlockWeight, config: Config) -> BlockWeight:
    return _dense(weight) - 1.0


def _logarithm(weight: BlockWeight, config: Config) -> BlockWeight:
    return torch.log(-_dense(weight))


def _with_middle(weight: BlockWeight, config: Config) -> BlockWeight:
    return _dense(weight).unsqueeze(1)


def _matrix_with_middle(shape: Shape, config: Config) -> Shape:
    if len(shape) != 2:
        raise ValueError(f"{list(shape)} is no matrix")
    return shape[0], 1, shape[1]


def _transpose(weight: BlockWeight, config: Config) -> BlockWeight:
    return weight.t()


def _reversed_matrix(shape: Shape, config: Config) -> Shape:
    if len(shape) > 2:
        raise ValueError(f"{list(shape)} is neither a matrix nor a bias")
    return shape[::-1]


def _reversed_shape(shape: Shape, config: Config) -> Shape:
    return shape[::-1]


def _dense(weight: BlockWeight) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.to(torch.float32)


MINUS_ONE = Transform(
    _minus_one, lambda weight, config: weight.to(torch.float32) + 1.0, dtype=torch.float32, copies=True
)
"""Zero-centred norm weights: the file has 1 + w, the checkpoint w. Subtracted in float32."""

LOGARITHM = Transform(
    _logarithm, lambda weight, config: -weight.to(torch.float32).exp(), dtype=torch.float32, copies=True
)
"""Speeds of decay: the file has −exp(a), the checkpoint a."""

DEPTHWISE = Transform(
    _with_middle,
    lambda weight, config: weight.squeeze(1),
    _matrix_with_middle,
    lambda shape, config: (shape[0], shape[2]),
    torch.float32,
)
"""Kernels of a depthwise convolution (C, K) to the checkpoint's (C, 1, K)."""

TRANSPOSED = Transform(
    _transpose, lambda weight, config: weight.t() if weight.ndim == 2 else weight, _reversed_matrix, _reversed_shape
)
"""(out, in) to the (in, out) of GPT-2's own checkpoints; a view. A bias stays as it is."""


def _flat(weight: BlockWeight, config: Config) -> BlockWeight:
    return _dense(weight).reshape(-1)


def _flat_shape(shape: Shape, config: Config) -> Shape:
    return (math.prod(shape),)


def _column_shape(shape: Shape, config: Config) -> Shape:
    return math.prod(shape), 1


FLAT = Transform(_flat, lambda weight, config: weight.reshape(-1, 1), _flat_shape, _column_shape, torch.float32)
"""A column in the file, a vector in the checkpoint."""

GROUPS = Transform(
    _flat,
    lambda weight, config: weight.reshape(config["n_groups"], -1),
    _flat_shape,
    lambda shape, config: (config["n_groups"], math.prod(shape) // config["n_groups"]),
    torch.float32,
)
"""A row for each group in the file, a vector in the checkpoint."""

FLAT_LOGARITHM = Transform(
    lambda weight, config: torch.log(-_dense(weight)).reshape(-1),
    lambda weight, config: -weight.to(torch.float32).exp().reshape(-1, 1),
    _flat_shape,
    _column_shape,
    torch.float32,
    copies=True,
)
"""LOGARITHM of a column."""

KIMI_LOGARITHM = Transform(
    lambda weight, config: torch.log(-_dense(weight)).reshape(1, 1, -1, 1),
    lambda weight, config: -weight.to(torch.float32).exp().reshape(-1, 1),
    lambda shape, config: (1, 1, math.prod(shape), 1),
    lambda shape, config: (math.prod(shape), 1),
    torch.float32,
    copies=True,
)
"""LOGARITHM of a column (heads, 1), which the checkpoint keeps as (1, 1, heads, 1)."""

ONE_ROW = Transform(
    lambda weight, config: _dense(weight).reshape(1, -1),
    lambda weight, config: weight.reshape(-1),
    lambda shape, config: (1, math.prod(shape)),
    lambda shape, config: (math.prod(shape),),
    torch.float32,
)
"""A vector in the file, a matrix of one row in the checkpoint."""


def _channels_first(weight: BlockWeight, config: Config) -> BlockWeight:
    dense = _dense(weight)
    return dense if dense.ndim == 1 else dense.reshape(-1, 1, dense.shape[-1])


CONVOLUTION = Transform(
    _channels_first,
    lambda weight, config: weight.squeeze(1) if weight.ndim == 3 else weight,
    lambda shape, config: shape if len(shape) == 1 else (math.prod(shape[:-1]), 1, shape[-1]),
    lambda shape, config: (shape[0], shape[2]) if len(shape) == 3 else shape,
    torch.float32,
)
"""Kernels of a depthwise convolution with any number of ones among their dimensions; a bias stays as it is."""


def latent_matrices(keys: BlockWeight, values: BlockWeight, rank: int) -> torch.Tensor:
    """Rows of each head's keys, then values, (heads · (Dk + Dv), rank), of the two stacks that newer files hold.

    The keys' matrices (heads, rank, Dk) are transposed, as absorption wants them; (heads, Dk, rank) is accepted too.
    """
    k, v = _dense(keys), _dense(values)
    return torch.cat([k.transpose(1, 2) if k.shape[1] == rank else k, v], dim=1).flatten(0, 1)


def split_qkv(hf_base: str, shape: Shape, config: Config) -> list[Part]:
    """The fused rows q | k | v as three weights."""
    head_dim = config["head_dim"]
    q = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    if not shape or shape[0] != q + 2 * kv:
        raise ValueError(f"{list(shape)} has not the {q + 2 * kv} rows of q, k and v")
    prefix = hf_base.rpartition(".")[0]
    return [
        Part(f"{prefix}.q_proj", 0, q),
        Part(f"{prefix}.k_proj", q, kv),
        Part(f"{prefix}.v_proj", q + kv, kv),
    ]


def split_heads(hf_base: str, shape: Shape, config: Config) -> list[Part]:
    """One norm weight per head, stacked in the file."""
    if len(shape) != 2 or shape[0] > config["num_attention_heads"]:
        raise ValueError(f"{list(shape)} is not a row for each head")
    return [Part(f"{hf_base}.norms.{head}", head, 1, is_row=True) for head in range(shape[0])]
