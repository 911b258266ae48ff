"""Multiply by codes and scales: a few rows at a time become floats, so no dense copy of the weight ever exists.

Source: OCP Microscaling Formats 1.0 (E2M1, E8M0); Micikevicius et al. 2022 (E4M3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vkit.kernels.reference.quantized_linear import TILE_ELEMENTS
from vkit.kernels.scaled import AWQ_SHIFTS, CODE_VALUES, InputRounding, ScaledMatrix

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_LIMITS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between neighbours; a value on one goes to the even code, which is the lower and the upper in turns."""
_E2M1_GROUP = 16
_TILE_ROWS = 32
"""Rows of a tile are a multiple of this, so that no AWQ word is cut."""


def scaled_linear(x: Tensor, weight: ScaledMatrix, bias: Tensor | None) -> Tensor:
    """x Wᵀ + bias in x.dtype; values and sums are float32 whatever x is."""
    rows, columns = weight.shape
    flat = x.reshape(-1, columns).to(torch.float32)
    if weight.input_scale is not None:
        flat = flat * weight.input_scale
    if weight.inputs is not None:
        flat = round_inputs(flat, weight.inputs)
    y = torch.empty(flat.shape[0], rows, dtype=torch.float32, device=x.device)
    step = max(1, TILE_ELEMENTS // (columns * _TILE_ROWS)) * _TILE_ROWS
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        y[:, start:stop] = flat @ dequantize_scaled(weight, start, stop).T
    if bias is not None:
        y += bias
    return y.reshape(*x.shape[:-1], rows).to(x.dtype)


def dequantize_scaled(weight: ScaledMatrix, start: int, stop: int) -> Tensor:
    """Rows start..stop as float32; `start` is a multiple of 32."""
    values = stored_codes(weight, start, stop)
    zeros = weight.zeros
    if zeros is not None:
        values -= _over_columns(spread_over_rows(zeros, weight.block[0], start, stop), weight)
    elif weight.zero:
        values -= weight.zero
    scales = spread_over_rows(weight.scales, weight.block[0], start, stop)
    if weight.factor is not None:
        scales = scales * weight.factor
    values *= _over_columns(scales, weight)
    return values


def round_inputs(x: Tensor, rounding: InputRounding) -> Tensor:
    """x (T, C) float32 rounded to the format and back."""
    if rounding.kind == "e2m1":
        return _round_e2m1(x, rounding)
    if rounding.scope == "group":
        columns = x.shape[1]
        padded = torch.nn.functional.pad(x, (0, -columns % rounding.group)).unflatten(1, (-1, rounding.group))
        return _round_rows(padded, rounding, (-1,)).flatten(1)[:, :columns]
    return _round_rows(x, rounding, (0, 1) if rounding.scope == "tensor" else (-1,))


def _round_rows(x: Tensor, rounding: InputRounding, over: tuple[int, ...]) -> Tensor:
    """`x` rounded with the static scale, or one scale for all values along the dimensions `over`."""
    zero: Tensor | float = 0.0
    if rounding.scale is not None:
        scale = rounding.scale
        zero = 0.0 if rounding.zero is None else rounding.zero.float()
    elif rounding.is_symmetric:
        scale = x.abs().amax(over, keepdim=True) / (127.0 if rounding.kind == "int8" else E4M3_MAX)
    else:
        # Source: compressed-tensors, asymmetric: 0 is always in range, and a code of its own.
        low, high = x.amin(over, keepdim=True).clamp_max(0.0), x.amax(over, keepdim=True).clamp_min(0.0)
        scale = (high - low) / 255.0
        zero = (-128.0 - low / torch.where(scale == 0, 1.0, scale)).round().clamp(-128, 127)
    scale = torch.where(scale == 0, 1.0, scale)
    if rounding.kind == "int8":
        return (((x / scale).round() + zero).clamp(-128, 127) - zero) * scale
    # Beyond the range the conversion itself may give NaN.
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def _round_e2m1(x: Tensor, rounding: InputRounding) -> Tensor:
    """Two levels: E2M1 codes, an E4M3 scale for 16 columns, a static scale for all."""
    assert rounding.scale is not None
    groups = x.unflatten(1, (-1, _E2M1_GROUP))
    blocks = (groups.abs().amax(-1, keepdim=True) / (E2M1_MAX * rounding.scale)).clamp_max(E4M3_MAX)
    unit = blocks.to(torch.float8_e4m3fn).float() * rounding.scale
    ratio = torch.where(unit == 0, 0.0, groups / torch.where(unit == 0, 1.0, unit))
    limits = torch.tensor(_E2M1_LIMITS, device=x.device)
    limits[1::2] = torch.nextafter(limits[1::2], torch.zeros_like(limits[1::2]))
    codes = torch.bucketize(ratio.abs().contiguous(), limits)
    magnitudes: Tensor = torch.tensor(_E2M1, device=x.device)[codes]
    rounded: Tensor = torch.copysign(magnitudes, ratio) * unit
    return rounded.flatten(1)


def stored_codes(weight: ScaledMatrix, start: int, stop: int) -> Tensor:
    """The codes of rows start..stop as float32 (rows, columns)."""
    columns, codes = weight.shape[1], weight.codes
    if weight.layout == "awq":
        shifts = torch.tensor(AWQ_SHIFTS, dtype=torch.int32, device=codes.device)
        words = codes[:, start // 8 : -(-stop // 8)].unsqueeze(-1)
        return ((words >> shifts) & 15).flatten(1).T.to(torch.float32).contiguous()
    if weight.layout == "words":
        return unpack_words(codes[start:stop], weight.bits, columns).to(torch.float32)
    if weight.layout == "e2m1":
        values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=codes.device)
        nibbles = torch.stack([codes[start:stop] & 15, codes[start:stop] >> 4], -1).flatten(1)
        return values[nibbles.int()]
    if weight.layout in CODE_VALUES:
        values = torch.tensor(CODE_VALUES[weight.layout], device=codes.device)
        nibbles = torch.stack([codes[start:stop] >> 4, codes[start:stop] & 15], -1).flatten(1)
        return values[nibbles.int()]
    return codes[start:stop].to(torch.float32, copy=True)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of `bits` bits in each row of words int32 (rows, W), low bits first -> integers."""
    mask = (1 << bits) - 1
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
        return ((words.unsqueeze(-1) >> shifts) & mask).flatten(1)[:, :count]
    # Codes straddle words: look at each through a window of two.
    places = torch.arange(count, device=words.device) * bits
    first = places // 32
    wide = words.long() & 0xFFFFFFFF
    second = (first + 1).clamp_max(words.shape[1] - 1)
    window = wide[:, first] | (wide[:, second] << 32)
    return (window >> (places % 32)) & mask


def spread_over_rows(values: Tensor, block_rows: int, start: int, stop: int) -> Tensor:
    """Per-block values (row blocks, column blocks) as float32 for each of the rows start..stop."""
    if values.shape[0] == 1:
        return values.float()
    first = start // block_rows
    blocks = values[first : -(-stop // block_rows)].float()
    if block_rows == 1:
        return blocks
    return blocks.repeat_interleave(block_rows, 0)[start - first * block_rows : stop - first * block_rows]


def _over_columns(values: Tensor, weight: ScaledMatrix) -> Tensor:
    """Per-group values (rows, groups) spread over the columns (rows, columns)."""
    if weight.group_index is not None:
        return values[:, weight.group_index]
    if values.shape[1] == 1:
        return values
    return values.repeat_interleave(weight.block[1], 1)[:, : weight.shape[1]]
