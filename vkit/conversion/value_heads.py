"""Qwen3.5's value heads: grouped under their key heads in checkpoints, tiled in GGUF files.

Head g = k * r + j of a checkpoint (r value heads for each of K key heads) is head j * K + k of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_ROW_WIDTHS = {"ssm_alpha": 1, "ssm_beta": 1, "ssm_a": 1, "ssm_dt.bias": 1}


def reordered(base: str, weight: Tensor, config: Mapping[str, Any], *, to_tiled: bool) -> Tensor:
    """The weight of GGUF base name `base` with its value heads in the other order; other weights as they are."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = config["linear_value_head_dim"]
    if keys == values:
        return weight
    shape = (keys, values // keys) if to_tiled else (values // keys, keys)
    heads = torch.arange(values).view(shape).t().reshape(-1)
    channels = (heads[:, None] * width + torch.arange(width)).reshape(-1)
    if base in _ROW_WIDTHS:
        return weight.index_select(0, heads)
    if base == "attn_gate":
        return weight.index_select(0, channels)
    if base in ("attn_qkv", "ssm_conv1d"):
        start = 2 * keys * config["linear_key_head_dim"]
        return weight.index_select(0, torch.cat([torch.arange(start), start + channels]))
    if base == "ssm_out":
        return weight.index_select(1, channels)
    return weight
