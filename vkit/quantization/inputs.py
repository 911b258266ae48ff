"""How a checkpoint wants activations rounded, and the tensors that say by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vkit.kernels import InputRounding
from vkit.quantization.scheme import LayerHeader, scalar


@dataclass(frozen=True)
class InputFormat:
    """Activations as `kind`; see `vkit.kernels.InputRounding`. Static scales are in the tensor `scale_name`."""

    kind: Literal["int8", "e4m3", "e2m1"]
    scope: Literal["token", "group", "tensor", "static"]
    group: int = 0
    is_symmetric: bool = True
    scale_name: str = "input_scale"
    is_inverse: bool = False
    """Whether the file holds the scale's reciprocal."""

    def check(self, layer: LayerHeader) -> None:
        """Take the tensors of a static scale."""
        if self.scope == "static":
            layer.take_scalar(self.scale_name)
            if not self.is_symmetric:
                layer.take("input_zero_point", [torch.int8, torch.int32], (), (1,))

    def build(self, tensors: Mapping[str, Tensor]) -> InputRounding:
        """The rounding."""
        if self.scope != "static":
            return InputRounding(self.kind, self.scope, self.group, is_symmetric=self.is_symmetric)
        scale = scalar(tensors[self.scale_name])
        zero = None if self.is_symmetric else scalar(tensors["input_zero_point"])
        return InputRounding(self.kind, "static", scale=1.0 / scale if self.is_inverse else scale, zero=zero)


FP8_TOKEN = InputFormat("e4m3", "token")
FP8_STATIC = InputFormat("e4m3", "static")
NVFP4_MULTIPLIED = InputFormat("e2m1", "static")
NVFP4_DIVIDED = InputFormat("e2m1", "static", scale_name="input_global_scale", is_inverse=True)
