"""Weights of quantised safetensors checkpoints in the layout of the kernels, packed at first use.

Four-bit and smaller integers with any zero points, bytes with a zero of 128 (or signed), E4M3, E2M1 with the scales of
MXFP4 or NVFP4, and NF4 and FP4 of bitsandbytes. What is not among these has no packed form and stays with the
reference.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from vkit.kernels.block_formats import BLOCK_FORMATS
from vkit.kernels.cpu.library import Library, make_op
from vkit.kernels.cpu.weights import PackedWeight
from vkit.kernels.reference.scaled_linear import spread_over_rows, stored_codes
from vkit.kernels.scaled import ScaledMatrix

_CODED = {("W4", 32): 200, ("W4", 128): 201, ("W8", 32): 202, ("W8", 128): 203, ("F8", 32): 204, ("F8", 128): 205}
"""Our own formats: kind of code and inputs per scale -> number (see vk.h)."""
_TABLES = {"nf4": ("NF4", 206), "fp4": ("FP4", 207)}
"""Those whose codes name floats, with a scale for 64 inputs."""
_TABLE_GROUP = 64
_ROWS_AT_ONCE = 512
"""A multiple of 32, so that neither an AWQ word nor a group of 16 rows is cut."""


class ScaledWeights:
    """Originals -> packed. An entry goes when its original does."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._packed: dict[int, PackedWeight | None] = {}

    def get(self, matrix: ScaledMatrix) -> PackedWeight | None:
        """The packed form, made now if this is the first time; None if there is none."""
        key = id(matrix)
        if key not in self._packed:
            with torch._C.DisableTorchFunction():  # packing is not part of a step that is being recorded
                self._packed[key] = self._pack(matrix)
            weakref.finalize(matrix, self._forget, key)
        return self._packed[key]

    def _forget(self, key: int) -> None:
        packed = self._packed.pop(key)
        if packed is not None:
            self._library.free(packed.address)

    def _pack(self, matrix: ScaledMatrix) -> PackedWeight | None:
        form = _form_of(matrix)
        if form is None:
            return None
        qtype, format_id = form
        library, (num_rows, columns) = self._library, matrix.shape
        group_bytes = library.group_bytes(format_id, columns)
        assert group_bytes, f"the library has no size for {qtype}"
        target = library.allocate(-(-num_rows // 16) * group_bytes)
        for start in range(0, num_rows, _ROWS_AT_ONCE):
            stop = min(num_rows, start + _ROWS_AT_ONCE)
            rows = _rows_of(matrix, qtype, format_id, start, stop)
            numbers = (format_id, stop - start, columns, rows.shape[1])
            library.run_now(
                make_op("PACK", stop - start, (rows.data_ptr(), target + start // 16 * group_bytes), numbers)
            )
        library.release_mapping(matrix.codes.data_ptr(), matrix.codes.nbytes)
        factor = 1.0 if matrix.factor is None else float(matrix.factor)
        return PackedWeight(target, qtype, format_id, num_rows, columns, factor)


def _form_of(matrix: ScaledMatrix) -> tuple[str, int] | None:
    """Kind and number of the packed format; None if the matrix has none."""
    columns, group = matrix.shape[1], matrix.block[1]
    is_one_group = matrix.scales.shape[1] == 1
    if matrix.group_index is not None or columns % 32 or not matrix.shape[0]:
        return None
    if matrix.layout == "e2m1":
        return _float4_form(matrix)
    if matrix.layout in _TABLES:
        fits = matrix.block[0] == 1 and group % _TABLE_GROUP == 0 and columns % _TABLE_GROUP == 0
        return _TABLES[matrix.layout] if fits else None
    kind = _kind(matrix)
    for size in (128, 32):
        if kind is not None and columns % size == 0 and (is_one_group or group % size == 0):
            return kind, _CODED[kind, size]
    return None


def _float4_form(matrix: ScaledMatrix) -> tuple[str, int] | None:
    columns, group = matrix.shape[1], matrix.block[1]
    if matrix.block[0] != 1:
        return None
    if group == 32 and matrix.scales.dtype is torch.float8_e8m0fnu:
        return "MXFP4", BLOCK_FORMATS["MXFP4"].type_id
    if group == 16 and matrix.scales.dtype is torch.float8_e4m3fn and columns % 64 == 0:
        return "NVFP4", BLOCK_FORMATS["NVFP4"].type_id
    return None


def _kind(matrix: ScaledMatrix) -> str | None:
    if matrix.layout == "bytes":
        if matrix.codes.dtype is torch.int8:
            return "W8" if matrix.zeros is None and matrix.zero == 0 else None
        has_form = matrix.codes.dtype is torch.float8_e4m3fn and matrix.zeros is None and matrix.zero == 0
        return "F8" if has_form and not _has_nan(matrix.codes) else None
    if matrix.bits <= 4:
        return "W4"
    centre = bool((matrix.zeros == 128).all()) if matrix.zeros is not None else matrix.zero == 128
    return "W8" if matrix.bits == 8 and centre else None


def _has_nan(codes: Tensor) -> bool:
    return any(bool(((part.view(torch.uint8) & 127) == 127).any()) for part in codes.split(_ROWS_AT_ONCE))


def _rows_of(matrix: ScaledMatrix, qtype: str, format_id: int, start: int, stop: int) -> Tensor:
    """Rows as PACK reads them: uint8 (rows, row_bytes)."""
    if qtype in ("MXFP4", "NVFP4"):
        return _float4_rows(matrix, qtype, start, stop)
    if qtype in ("NF4", "FP4"):
        return _table_rows(matrix, start, stop)
    size = 128 if format_id in (201, 203, 205) else 32
    scales = _spread(matrix.scales, matrix, size, start, stop)
    parts = [_bytes_of(scales)]
    if qtype == "F8":
        codes = matrix.codes[start:stop].view(torch.uint8).unflatten(1, (-1, size))
    else:
        codes = stored_codes(matrix, start, stop)
        if matrix.codes.dtype is torch.int8:
            codes += 128
        codes = codes.to(torch.uint8).unflatten(1, (-1, size))
    if qtype == "W4":
        zeros = matrix.zero if matrix.zeros is None else _spread(matrix.zeros, matrix, size, start, stop)
        parts.append(_bytes_of(scales * zeros))
        codes = codes.unflatten(2, (-1, 2, 16))
        codes = (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(2)
    return torch.cat([*parts, codes], dim=2).flatten(1)


def _table_rows(matrix: ScaledMatrix, start: int, stop: int) -> Tensor:
    """A scale, then twice 32 codes, input i beside input i + 16; for each 64 inputs."""
    stored = matrix.codes[start:stop]
    codes = torch.stack([stored >> 4, stored & 15], -1).flatten(1).unflatten(1, (-1, 2, 2, 16))
    packed = (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(2)
    return torch.cat([_bytes_of(_spread(matrix.scales, matrix, _TABLE_GROUP, start, stop)), packed], dim=2).flatten(1)


def _bytes_of(values: Tensor) -> Tensor:
    """float32 (rows, groups) as uint8 (rows, groups, 4)."""
    return values.contiguous().unsqueeze(-1).view(torch.uint8)


def _spread(values: Tensor, matrix: ScaledMatrix, size: int, start: int, stop: int) -> Tensor:
    """Per-block values as float32 for each row and `size` columns."""
    rows = spread_over_rows(values, matrix.block[0], start, stop).expand(stop - start, -1)
    count = matrix.shape[1] // size
    if rows.shape[1] == 1:
        return rows.expand(-1, count).contiguous()
    return rows.repeat_interleave(matrix.block[1] // size, 1)[:, :count].contiguous()


def _float4_rows(matrix: ScaledMatrix, qtype: str, start: int, stop: int) -> Tensor:
    """Blocks as GGUF has them: scale bytes, then codes, of 32 (MXFP4) or four times 16 (NVFP4) inputs."""
    stored = matrix.codes[start:stop]
    codes = torch.stack([stored & 15, stored >> 4], -1).flatten(1)
    scales = matrix.scales[start:stop].view(torch.uint8)
    half, per_block = (16, 1) if qtype == "MXFP4" else (8, 4)
    codes = codes.unflatten(1, (-1, per_block, 2, half))
    packed = (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(2)
    return torch.cat([scales.unflatten(1, (-1, per_block)), packed], dim=2).flatten(1)
