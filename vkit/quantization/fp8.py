"""Eight-bit floats: one scale for all, for each row, or for each block of the weight.

Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning; DeepSeek-V3 technical report, section 3.3 (blocks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vkit.kernels import ScaledMatrix
from vkit.quantization.inputs import FP8_STATIC, FP8_TOKEN, InputFormat
from vkit.quantization.scheme import FLOATS, Declaration, LayerFormat, LayerHeader, is_listed


@dataclass(frozen=True)
class Fp8Format(LayerFormat):
    """`weight` E4M3 (out, in) and a tensor of scales, which are multiplied whatever they are called."""

    strategy: Literal["tensor", "channel", "block"]
    inputs: InputFormat | None
    block: tuple[int, int] = (128, 128)
    scale_name: str = "weight_scale"
    leaves_out: tuple[str, ...] = ()
    """Suffixes that such layers may have and that nothing needs."""
    name = "fp8"

    @property
    def signature(self) -> frozenset[str]:
        """The scale's suffix."""
        return frozenset({self.scale_name})

    def check(self, layer: LayerHeader) -> tuple[int, int]:
        """(rows, columns) of the weight."""
        rows, columns = layer.take("weight", [torch.float8_e4m3fn], ndim=2)
        if self.strategy == "tensor":
            layer.take(self.scale_name, FLOATS, (), (1,), (1, 1))
        elif self.strategy == "channel":
            layer.take(self.scale_name, FLOATS, (rows, 1), (rows,))
        else:
            down, across = self._blocks((rows, columns))
            layer.take(self.scale_name, FLOATS, (down, across), (down, 1, across, 1))
        if self.inputs is not None:
            self.inputs.check(layer)
        layer.leave_out(*self.leaves_out)
        return rows, columns

    def build(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> ScaledMatrix:
        """The weight."""
        rows, columns = shape
        block = {"tensor": (rows, columns), "channel": (1, columns), "block": self.block}[self.strategy]
        blocks = (-(-rows // block[0]), -(-columns // block[1]))
        scales = tensors[self.scale_name].reshape(blocks)
        inputs = None if self.inputs is None else self.inputs.build(tensors)
        return ScaledMatrix("bytes", tensors["weight"], scales, shape, block, inputs=inputs)

    def _blocks(self, shape: tuple[int, int]) -> tuple[int, int]:
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])


class Fp8Scheme:
    """`quant_method: fp8`: every linear layer but those listed by name."""

    name = "fp8"

    def __init__(self, declared: Declaration) -> None:
        """Read the declaration.

        Raises:
            ModelLoadError: another way of scaling.
        """
        activations = declared.one_of("activation_scheme", ["static", "dynamic"], "dynamic")
        declared.one_of("fmt", ["e4m3"], "e4m3")
        block = declared.keys.get("weight_block_size")
        self._plain = [*declared.names("modules_to_not_convert"), *declared.names("ignored_layers")]
        if block is None:
            self._format = Fp8Format("tensor", FP8_STATIC if activations == "static" else FP8_TOKEN)
            return
        if activations == "static":
            declared.refuse("activation_scheme 'static' with weight_block_size is not supported (supported: dynamic)")
        rows, columns = block_size(declared, "weight_block_size", block)
        inputs = InputFormat("e4m3", "group", columns)
        self._format = Fp8Format("block", inputs, (rows, columns), "weight_scale_inv")

    def format_of(self, layer: str) -> LayerFormat | None:
        """The format of a layer."""
        return None if is_listed(layer, self._plain) else self._format


def block_size(declared: Declaration, key: str, value: Any) -> tuple[int, int]:
    """Two positive sizes.

    Raises:
        ModelLoadError: anything else.
    """
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        declared.refuse(f"{key} must be two positive sizes, got {value!r}")
    return value[0], value[1]
