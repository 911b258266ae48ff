"""Integer weights as compressed-tensors writes them: packed in words, or one byte each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vkit.errors import ModelLoadError
from vkit.kernels import ScaledMatrix
from vkit.kernels.reference.scaled_linear import unpack_words
from vkit.quantization.gptq import group_index
from vkit.quantization.inputs import InputFormat
from vkit.quantization.scheme import FLOATS, LayerFormat, LayerHeader


@dataclass(frozen=True)
class PackedIntegers(LayerFormat):
    """`weight_packed` (out, words) and `weight_scale` (out, groups); codes and zero points are kept without sign.

    `weight_zero_point` (words, groups) is packed along the outputs; `weight_shape` tells padding from inputs.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool
    is_shuffled: bool
    inputs: InputFormat | None
    name = "pack-quantized"
    signature = frozenset({"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"})

    def check(self, layer: LayerHeader) -> tuple[int, int]:
        """(rows, columns) of the weight."""
        rows, words = layer.take("weight_packed", [torch.int32], ndim=2)
        layer.take("weight_shape", [torch.int64, torch.int32], (2,))
        scale_shape = layer.take("weight_scale", FLOATS, ndim=2)
        # The last word may be padded. Whole groups tell the width; without them only the values of a tensor do.
        columns = scale_shape[1] * self.group_size if self.group_size else int(layer.load("weight_shape")[1])
        if self._num_words(columns) != words or scale_shape[0] != rows:
            layer.refuse(
                "weight_scale", f"has shape {scale_shape}, which does not fit weight_packed of shape {(rows, words)}"
            )
        groups = layer.groups(columns, self.group_size)
        if scale_shape[1] != groups:
            layer.refuse("weight_scale", f"has shape {scale_shape}, expected {(rows, groups)}")
        if not self.is_symmetric:
            layer.take("weight_zero_point", [torch.int32], (self._num_words(rows), groups))
        if self.is_shuffled:
            layer.take("weight_g_idx", [torch.int32, torch.int64], (columns,))
        if self.inputs is not None:
            self.inputs.check(layer)
        return rows, columns

    def build(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> ScaledMatrix:
        """The weight."""
        rows, columns = shape
        if tensors["weight_shape"].tolist() != [rows, columns]:
            raise ModelLoadError(f"weight_shape is {tensors['weight_shape'].tolist()}, expected {[rows, columns]}")
        scales = tensors["weight_scale"]
        zeros = None
        if not self.is_symmetric:
            zeros = unpack_words(tensors["weight_zero_point"].T, self.bits, rows).T.to(torch.uint8)
        block = (1, columns // scales.shape[1])
        return ScaledMatrix(
            "words",
            tensors["weight_packed"],
            scales,
            shape,
            block,
            bits=self.bits,
            zero=1 << (self.bits - 1),
            zeros=zeros,
            group_index=group_index(tensors.get("weight_g_idx"), columns, block[1]),
            inputs=None if self.inputs is None else self.inputs.build(tensors),
        )

    def _num_words(self, count: int) -> int:
        return -(-count * self.bits // 32)


@dataclass(frozen=True)
class ByteIntegers(LayerFormat):
    """`weight` int8 (out, in) and `weight_scale` for all, for each row or for each group of a row."""

    strategy: str
    group_size: int | None
    is_symmetric: bool
    inputs: InputFormat | None
    name = "int8"
    signature = frozenset({"weight_scale", "weight_zero_point"})

    def check(self, layer: LayerHeader) -> tuple[int, int]:
        """(rows, columns) of the weight."""
        rows, columns = layer.take("weight", [torch.int8], ndim=2)
        groups = layer.groups(columns, self.group_size)
        shapes: list[tuple[int, ...]] = [(), (1,), (1, 1)] if self.strategy == "tensor" else [(rows, groups)]
        if self.strategy == "channel":
            shapes.append((rows,))
        layer.take("weight_scale", FLOATS, *shapes)
        if not self.is_symmetric:
            layer.take("weight_zero_point", [torch.int8], *shapes)
        if self.inputs is not None:
            self.inputs.check(layer)
        return rows, columns

    def build(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> ScaledMatrix:
        """The weight."""
        rows, columns = shape
        blocks = (1, 1) if self.strategy == "tensor" else (rows, columns // (self.group_size or columns))
        block = (rows // blocks[0], columns // blocks[1])
        zeros = None if self.is_symmetric else tensors["weight_zero_point"].reshape(blocks)
        return ScaledMatrix(
            "bytes",
            tensors["weight"],
            tensors["weight_scale"].reshape(blocks),
            shape,
            block,
            zeros=zeros,
            inputs=None if self.inputs is None else self.inputs.build(tensors),
        )
