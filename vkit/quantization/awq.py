"""AWQ: four-bit codes packed along the outputs, a scale and a zero point for each group of inputs.

Source: Lin et al. 2023, AWQ; layout of AutoAWQ's "gemm" version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vkit.kernels import ScaledMatrix
from vkit.kernels.scaled import AWQ_SHIFTS
from vkit.quantization.scheme import FLOATS, Declaration, LayerFormat, LayerHeader


@dataclass(frozen=True)
class AwqFormat(LayerFormat):
    """`qweight` (in, out / 8), `qzeros` (groups, out / 8), `scales` (groups, out)."""

    group_size: int
    name = "awq"
    signature = frozenset({"qweight", "qzeros", "scales"})

    def check(self, layer: LayerHeader) -> tuple[int, int]:
        """(rows, columns) of the weight."""
        columns, words = layer.take("qweight", [torch.int32], ndim=2)
        groups = layer.groups(columns, self.group_size)
        layer.take("qzeros", [torch.int32], (groups, words))
        layer.take("scales", FLOATS, (groups, words * 8))
        return words * 8, columns

    def build(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> ScaledMatrix:
        """The weight."""
        scales = tensors["scales"].T
        shifts = torch.tensor(AWQ_SHIFTS, dtype=torch.int32)
        zeros = ((tensors["qzeros"].unsqueeze(-1) >> shifts) & 15).flatten(1).T.to(torch.uint8)
        block = (1, shape[1] // scales.shape[1])
        return ScaledMatrix("awq", tensors["qweight"], scales, shape, block, bits=4, zeros=zeros)


class AwqScheme:
    """Every linear layer but those whose name contains one of `modules_to_not_convert`."""

    name = "awq"

    def __init__(self, declared: Declaration) -> None:
        """Read the declaration.

        Raises:
            ModelLoadError: another width or version.
        """
        declared.one_of("bits" if "bits" in declared.keys else "w_bit", [4])
        if not declared.flag("zero_point", default=True):
            declared.refuse("zero_point false is not supported (supported: true)")
        version = declared.keys.get("version", "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            declared.refuse(f"version {version!r} is not supported (supported: gemm)")
        group_size = declared.integer("group_size" if "group_size" in declared.keys else "q_group_size", 128)
        self._format = AwqFormat(group_size)
        self._plain = declared.names("modules_to_not_convert")

    def format_of(self, layer: str) -> LayerFormat | None:
        """The format of a layer."""
        return None if any(part in layer for part in self._plain) else self._format
