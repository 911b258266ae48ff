"""A weight that stays in its packed block form. Knows rows and bytes; what the bytes mean is the kernels' business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
import torch

from vkit import kernels
from vkit.kernels.block_formats import format_of


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A packed weight of logical shape (rows, columns), or (experts, rows, columns).

    `data` is uint8 (rows, row_bytes) or (experts, rows, row_bytes); a row is a whole number of blocks of type `qtype`
    (a GGUF type name such as "Q4_K"), so rows can be sliced, permuted and joined without touching a block. The data may
    be a view of a read-only file mapping: never write into it.

    `scale`, if present, is float32 of shape () or (experts,) and multiplies every value.
    `is_transposed` marks a weight whose logical shape is (columns, rows): the blocks run down the first axis. Call
    `t()` before working with rows.
    """

    data: torch.Tensor
    qtype: str
    shape: tuple[int, ...]
    scale: torch.Tensor | None = None
    is_transposed: bool = False

    def __post_init__(self) -> None:
        block = format_of(self.qtype, "QuantizedTensor")
        if self.data.dtype != torch.uint8:
            raise TypeError(f"QuantizedTensor: data of {self.data.dtype}, expected torch.uint8")
        packed = self.shape[:-2] + self.shape[:-3:-1] if self.is_transposed else self.shape
        if len(packed) not in (2, 3):
            raise ValueError(f"QuantizedTensor: shape {self.shape}, expected two or three dimensions")
        expected = (*packed[:-1], block.row_bytes(packed[-1]))
        if tuple(self.data.shape) != expected:
            raise ValueError(f"QuantizedTensor: data {tuple(self.data.shape)}, expected {expected} for {self.qtype}")

    @property
    def nbytes(self) -> int:
        """Bytes of the packed data."""
        return self.data.numel()

    @property
    def ndim(self) -> int:
        """Number of logical dimensions: 2, or 3 with experts."""
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        """Where the packed data lives."""
        return self.data.device

    def t(self) -> QuantizedTensor:
        """The same weight with its last two axes exchanged; nothing is copied."""
        return replace(self, shape=self.shape[:-2] + self.shape[:-3:-1], is_transposed=not self.is_transposed)

    def rows(self, index: torch.Tensor | slice) -> QuantizedTensor:
        """The rows that `index` selects, in its order. A slice is a view; an index tensor (R,) of int64 copies.

        With experts the same rows of every expert are taken.
        """
        self._need_rows("rows")
        data = self.data[..., index, :] if isinstance(index, slice) else _selected(self.data, index)
        return replace(self, data=data, shape=(*self.shape[:-2], data.shape[-2], self.shape[-1]))

    def narrow(self, start: int, length: int) -> QuantizedTensor:
        """`length` rows from row `start`, as a view."""
        num_rows = self.shape[-2]
        if min(start, length) < 0 or start + length > num_rows:
            raise ValueError(f"narrow: rows {start}..{start + length}, expected a range within 0..{num_rows}")
        return self.rows(slice(start, start + length))

    def expert(self, index: int) -> QuantizedTensor:
        """The weight (rows, columns) of one expert, as a view."""
        if self.ndim != 3:
            raise ValueError(f"expert: shape {self.shape}, expected three dimensions")
        scale = self.scale[index] if self.scale is not None and self.scale.ndim else self.scale
        return replace(self, data=self.data[index], shape=self.shape[1:], scale=scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """All values as a dense tensor of `shape`; computed in float32, then cast to `dtype`."""
        values = kernels.dequantize(self.data, self.qtype, dtype=torch.float32)
        if self.scale is not None:
            values *= self.scale.reshape(-1, 1, 1) if self.scale.ndim else self.scale
        return (values.transpose(-1, -2) if self.is_transposed else values).to(dtype)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same weight on `device`."""
        scale = None if self.scale is None else self.scale.to(device)
        return replace(self, data=self.data.to(device), scale=scale)

    def arranged(self) -> QuantizedTensor:
        """The same weight in the layout that the kernels of its device want (then a copy, of a type of its own)."""
        data, qtype = kernels.pack(self.data, self.qtype)
        return replace(self, data=data, qtype=qtype)

    def can_join(self, other: QuantizedTensor) -> bool:
        """Whether the rows of `other` can follow the rows of this weight in one packed tensor."""
        return (
            self.qtype == other.qtype
            and not (self.is_transposed or other.is_transposed)
            and self.shape[:-2] == other.shape[:-2]
            and self.shape[-1] == other.shape[-1]
            and self.device == other.device
            and _same_scale(self.scale, other.scale)
        )

    def _need_rows(self, operation: str) -> None:
        if self.is_transposed:
            raise ValueError(f"{operation}: the weight is transposed, its rows are not contiguous; call t() first")


BlockWeight = torch.Tensor | QuantizedTensor
"""What a GGUF file holds."""
Weight = BlockWeight | kernels.ScaledMatrix
"""What a checkpoint loads."""


@overload
def placed(weight: BlockWeight, device: torch.device | str) -> BlockWeight: ...
@overload
def placed(weight: Weight, device: torch.device | str) -> Weight: ...
def placed(weight: Weight, device: torch.device | str) -> Weight:
    """The weight on `device`, laid out as the kernels there want it if it is packed."""
    moved = weight.to(device)
    return moved if isinstance(moved, torch.Tensor) else moved.arranged()


def concat_rows(weights: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """One weight with the rows of all `weights`, in order (copied, unless there is only one).

    Raises:
        ValueError: two of them differ in type, columns, experts, device or scale (see `can_join`).
    """
    first, *others = weights
    first._need_rows("concat_rows")
    for other in others:
        if not first.can_join(other):
            raise ValueError(
                f"concat_rows: {other.qtype} {other.shape} cannot follow {first.qtype} {first.shape}: "
                "expected equal type, columns, device and scale"
            )
    if not others:
        return first
    data = torch.cat([weight.data for weight in weights], dim=-2)
    return replace(first, data=data, shape=(*first.shape[:-2], data.shape[-2], first.shape[-1]))


def _same_scale(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _selected(data: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows of `data` (..., rows, bytes) that `index` (R,) names, copied.

    On the host by numpy, which copies row by row: torch goes byte by byte, and wakes all its threads for it.
    """
    if data.device.type != "cpu":
        return data.index_select(-2, index)
    return torch.from_numpy(np.take(data.numpy(), index.numpy(), axis=-2))
