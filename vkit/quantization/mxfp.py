"""MXFP4 and MXFP8: small floats with a power of two for 32 of them.

Source: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vkit.kernels import ScaledMatrix
from vkit.quantization.scheme import LayerFormat, LayerHeader

GROUP = 32


@dataclass(frozen=True)
class MxFormat(LayerFormat):
    """`weight_packed` uint8 (out, in / 2) or `weight` E4M3 (out, in), and `weight_scale` E8M0 (out, in / 32)."""

    is_fp4: bool
    name = "mxfp"
    signature = frozenset({"weight_packed", "weight_scale"})

    def check(self, layer: LayerHeader) -> tuple[int, int]:
        """(rows, columns) of the weight."""
        if self.is_fp4:
            rows, columns = layer.take("weight_packed", [torch.uint8], ndim=2)
            columns *= 2
        else:
            rows, columns = layer.take("weight", [torch.float8_e4m3fn], ndim=2)
        layer.take("weight_scale", [torch.uint8, torch.float8_e8m0fnu], (rows, layer.groups(columns, GROUP)))
        return rows, columns

    def build(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> ScaledMatrix:
        """The weight."""
        scales = tensors["weight_scale"].view(torch.float8_e8m0fnu)
        if self.is_fp4:
            return ScaledMatrix("e2m1", tensors["weight_packed"], scales, shape, (1, GROUP))
        return ScaledMatrix("bytes", tensors["weight"], scales, shape, (1, GROUP))
