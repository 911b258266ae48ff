"""NVFP4: four-bit floats, an eight-bit float for 16 of them, and one float32 for the whole weight.

Two writers name the tensors differently, and one stores the reciprocal of the other's global scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vkit.kernels import ScaledMatrix
from vkit.quantization.inputs import InputFormat
from vkit.quantization.scheme import FLOATS, LayerFormat, LayerHeader, scalar

GROUP = 16


@dataclass(frozen=True)
class Nvfp4Format(LayerFormat):
    """Codes uint8 (out, in / 2), `weight_scale` E4M3 (out, in / 16), a global scale."""

    codes_name: str
    global_name: str
    is_inverse: bool
    """Whether the global scale divides."""
    inputs: InputFormat | None
    input_name: str
    """The scale of activations, which files have even where activations stay as they are."""
    has_pre_scale: bool = False
    name = "nvfp4"

    @property
    def signature(self) -> frozenset[str]:
        """Suffixes of scales."""
        return frozenset({"weight_scale", self.global_name, "weight_packed"})

    def check(self, layer: LayerHeader) -> tuple[int, int]:
        """(rows, columns) of the weight."""
        rows, num_bytes = layer.take(self.codes_name, [torch.uint8], ndim=2)
        columns = num_bytes * 2
        groups = layer.groups(columns, GROUP)
        layer.take("weight_scale", [torch.float8_e4m3fn], (rows, groups))
        layer.take_scalar(self.global_name)
        if self.inputs is not None:
            self.inputs.check(layer)
        else:
            layer.leave_out(self.input_name)
        if self.has_pre_scale:
            layer.take("pre_quant_scale", FLOATS, (columns,))
        return rows, columns

    def build(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> ScaledMatrix:
        """The weight."""
        factor = scalar(tensors[self.global_name])
        return ScaledMatrix(
            "e2m1",
            tensors[self.codes_name],
            tensors["weight_scale"],
            shape,
            (1, GROUP),
            factor=1.0 / factor if self.is_inverse else factor,
            inputs=None if self.inputs is None else self.inputs.build(tensors),
            input_scale=tensors["pre_quant_scale"].float() if self.has_pre_scale else None,
        )


def model_opt_format(inputs: InputFormat | None, *, has_pre_scale: bool = False) -> Nvfp4Format:
    """As ModelOpt writes it."""
    return Nvfp4Format("weight", "weight_scale_2", False, inputs, "input_scale", has_pre_scale)


def compressed_format(inputs: InputFormat | None) -> Nvfp4Format:
    """As compressed-tensors writes it."""
    return Nvfp4Format("weight_packed", "weight_global_scale", True, inputs, "input_global_scale")
