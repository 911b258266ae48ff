"""Weights stored as small codes and scales, and products with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from vkit.kernels.dispatch import ops, pack_scaled

CodeLayout = Literal["words", "awq", "bytes", "e2m1", "nf4", "fp4"]
PAIRS = ("e2m1", "nf4", "fp4")
"""Layouts with two codes to a byte."""
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Where an AWQ word keeps its eight columns."""
_FP4 = tuple(value / 12 for value in (0, 0.0625, 8, 12, 4, 6, 2, 3))
CODE_VALUES: Mapping[str, tuple[float, ...]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (*_FP4, *(-value for value in _FP4)),
}
"""What the four-bit codes of bitsandbytes stand for, as parts of a block's largest magnitude.

Source: Dettmers et al. 2023, QLoRA, appendix E (NF4); the library's own four-bit floats (FP4).
"""


@dataclass(frozen=True, slots=True, eq=False)
class InputRounding:
    """How the activations of a product are rounded first: to `kind`, then back, so that the product sees what it would
    on hardware that multiplies the codes.

    The range is taken from the activations per row ("token"), per `group` columns of a row ("group") or over all
    ("tensor"), or is given by `scale` ("static"). "e2m1" has a scale per 16 columns below the static one.
    """

    kind: Literal["int8", "e4m3", "e2m1"]
    scope: Literal["token", "group", "tensor", "static"]
    group: int = 0
    scale: Tensor | None = None
    """float32 (): the size of a code's unit."""
    zero: Tensor | None = None
    """The code of 0 under a static scale."""
    is_symmetric: bool = True

    def __post_init__(self) -> None:
        if (self.scope == "static") != (self.scale is not None):
            raise ValueError(
                f"InputRounding: scope {self.scope!r} and scale {self.scale}, expected both static or none"
            )
        if self.scope == "group" and self.group < 1:
            raise ValueError(f"InputRounding: group of {self.group} columns, expected at least one")
        if self.kind == "e2m1" and self.scope != "static":
            raise ValueError(f"InputRounding: e2m1 with scope {self.scope!r}, expected static")

    def to(self, device: torch.device | str) -> InputRounding:
        """The same on `device`."""
        moved = [None if value is None else value.to(device) for value in (self.scale, self.zero)]
        return replace(self, scale=moved[0], zero=moved[1])


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ScaledMatrix:
    """A weight W (rows, columns): W[o, i] = (code[o, i] - zero) · scale[o // block rows, i // block columns] · factor.

    `codes` by layout: "words" int32 (rows, words), `bits` a code, one stream of bits along the columns, low first;
    "awq" int32 (columns, rows / 8); "bytes" int8 or float8 (rows, columns); "e2m1" uint8 (rows, columns / 2), the even
    column in the low nibble; "nf4" and "fp4" (CODE_VALUES) the same with the even column in the high one. Transposed
    views are as good as copies. All may be views of a read-only file mapping.
    `scales` (row blocks, column blocks) of any float type; `zeros` integers of the same shape, or one number `zero`.
    `group_index` int32 (columns,), if given, names each column's block instead of i // block columns.
    """

    layout: CodeLayout
    codes: Tensor
    scales: Tensor
    shape: tuple[int, int]
    block: tuple[int, int]
    bits: int = 8
    zero: int = 0
    zeros: Tensor | None = None
    factor: Tensor | None = None
    """float32 ()."""
    group_index: Tensor | None = None
    inputs: InputRounding | None = None
    input_scale: Tensor | None = None
    """(columns,), multiplied into the activations before anything else."""

    def __post_init__(self) -> None:
        rows, columns = self.shape
        wanted = {
            "words": (rows, -(-columns * self.bits // 32)),
            "awq": (columns, rows // 8),
            "bytes": (rows, columns),
        }.get(self.layout, (rows, columns // 2))
        if tuple(self.codes.shape) != wanted:
            raise ValueError(f"ScaledMatrix: {self.layout} codes {tuple(self.codes.shape)}, expected {wanted}")
        if self.layout in ("words", "awq") and self.codes.dtype != torch.int32:
            raise TypeError(f"ScaledMatrix: {self.layout} codes of {self.codes.dtype}, expected torch.int32")
        if (self.layout == "awq" and rows % 8) or (self.layout in PAIRS and columns % 2):
            raise ValueError(f"ScaledMatrix: shape {self.shape} does not fill whole {self.layout} words")
        blocks = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        if tuple(self.scales.shape) != blocks:
            raise ValueError(f"ScaledMatrix: scales {tuple(self.scales.shape)}, expected {blocks}")
        if self.zeros is not None and self.zeros.shape != self.scales.shape:
            raise ValueError(f"ScaledMatrix: zeros {tuple(self.zeros.shape)}, expected {blocks}")
        if self.group_index is not None and self.group_index.shape != (columns,):
            raise ValueError(f"ScaledMatrix: group_index {tuple(self.group_index.shape)}, expected ({columns},)")

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def device(self) -> torch.device:
        """Where the codes live."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        tensors = (self.codes, self.scales, self.zeros, self.factor, self.group_index, self.input_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def to(self, device: torch.device | str) -> ScaledMatrix:
        """The same weight on `device`."""
        return self._mapped(lambda tensor: tensor.to(device))

    def arranged(self) -> ScaledMatrix:
        """The same weight in the layout that the kernels of its device want."""
        return pack_scaled(self)

    def rows(self, index: Tensor) -> ScaledMatrix:
        """The rows that `index` (R,) int64 selects, in its order, as a copy."""
        is_awq = self.layout == "awq"
        codes = words_of_awq(self.codes) if is_awq else self.codes
        block_rows = index // self.block[0]
        zeros = self.zeros
        return replace(
            self,
            layout="words" if is_awq else self.layout,
            codes=_picked(codes, index),
            shape=(index.shape[0], self.shape[1]),
            block=(1, self.block[1]),
            scales=_picked(self.scales, block_rows),
            zeros=None if zeros is None else _picked(zeros, block_rows),
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All values (rows, columns); computed in float32, then cast to `dtype`."""
        out: Tensor = ops(torch.empty(0, device=self.device)).dequantize_scaled(self, 0, self.shape[0])
        return out.to(dtype)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> ScaledMatrix:
        def changed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        return replace(
            self,
            codes=change(self.codes),
            scales=change(self.scales),
            zeros=changed(self.zeros),
            factor=changed(self.factor),
            group_index=changed(self.group_index),
            input_scale=changed(self.input_scale),
            inputs=None if self.inputs is None else self.inputs.to(self.codes.device),
        )


def scaled_linear(x: Tensor, weight: ScaledMatrix, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias, with x rounded as the weight says. x (..., columns), bias (rows,) -> (..., rows) in x.dtype.

    Raises:
        ValueError: widths that do not fit.
    """
    rows, columns = weight.shape
    if x.shape[-1] != columns:
        raise ValueError(f"scaled_linear: x {tuple(x.shape)}, expected a width of {columns}")
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"scaled_linear: bias {tuple(bias.shape)}, expected ({rows},)")
    out: Tensor = ops(x).scaled_linear(x, weight, bias)
    return out


def _picked(values: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor of any type: one-byte floats cannot be indexed as such."""
    if values.itemsize == 1:
        return values.contiguous().view(torch.uint8).index_select(0, index).view(values.dtype)
    return values.index_select(0, index)


def words_of_awq(codes: Tensor) -> Tensor:
    """AWQ codes (columns, rows / 8) as "words" of 4 bits (rows, columns / 8)."""
    shifts = torch.tensor(AWQ_SHIFTS, dtype=torch.int32, device=codes.device)
    values = ((codes.unsqueeze(-1) >> shifts) & 15).flatten(1).T
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % 8)).unflatten(1, (-1, 8)).long()
    places = torch.arange(0, 32, 4, device=codes.device)
    words = (padded << places).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
