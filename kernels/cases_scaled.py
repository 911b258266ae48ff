"""Products with codes and scales: the calls on which they are judged, and those that are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkit.kernels.planes import as_rows
from vkit.kernels.scaled import ScaledMatrix

if TYPE_CHECKING:
    from vkit.kernels.cases import Source
    from vkit.kernels.speeds import Sizes, Work

Build = Callable[[int, int, torch.Generator], ScaledMatrix]


def _words(bits: int, group: int, *, zeros: bool, across: bool = False) -> Build:
    """Codes along the columns, in words that lie next to those of the next row if `across` (as GPTQ has them)."""

    def build(rows: int, columns: int, generator: torch.Generator) -> ScaledMatrix:
        shape = (rows, -(-columns * bits // 32))
        codes = _codes(shape[::-1] if across else shape, generator)
        scales = torch.rand(rows, -(-columns // group), generator=generator) / (8 << bits)
        stored = _bytes(tuple(scales.shape), generator) % (1 << bits) if zeros else None
        return ScaledMatrix(
            "words",
            codes.T if across else codes,
            scales.half(),
            (rows, columns),
            (1, group),
            bits=bits,
            zero=1 << (bits - 1),
            zeros=stored,
        )

    return build


def _awq(rows: int, columns: int, generator: torch.Generator) -> ScaledMatrix:
    codes = _codes((columns, rows // 8), generator)
    scales = (torch.rand(-(-columns // 128), rows, generator=generator) / 128).half().T
    zeros = _bytes(tuple(scales.shape), generator) % 16
    return ScaledMatrix("awq", codes, scales, (rows, columns), (1, 128), bits=4, zeros=zeros)


def _fp8(block: tuple[int, int]) -> Build:
    def build(rows: int, columns: int, generator: torch.Generator) -> ScaledMatrix:
        codes = _bytes((rows, columns), generator)
        codes = torch.where((codes & 127) == 127, 0, codes).view(torch.float8_e4m3fn)
        rows_of_block = min(rows, block[0])
        shape = (-(-rows // rows_of_block), -(-columns // min(columns, block[1])))
        scales = torch.rand(shape, generator=generator) / 4000
        return ScaledMatrix("bytes", codes, scales, (rows, columns), (rows_of_block, min(columns, block[1])))

    return build


def _int8(rows: int, columns: int, generator: torch.Generator) -> ScaledMatrix:
    codes = _bytes((rows, columns), generator).view(torch.int8)
    scales = (torch.rand(rows, 1, generator=generator) / 2000).bfloat16()
    return ScaledMatrix("bytes", codes, scales, (rows, columns), (1, columns))


def _float4(group: int) -> Build:
    def build(rows: int, columns: int, generator: torch.Generator) -> ScaledMatrix:
        scales = torch.rand(rows, columns // group, generator=generator) * 3 + 0.1
        dtype = torch.float8_e8m0fnu if group == 32 else torch.float8_e4m3fn
        factor = torch.tensor(0.013)
        codes = _bytes((rows, columns // 2), generator)
        return ScaledMatrix("e2m1", codes, scales.to(dtype), (rows, columns), (1, group), factor=factor)

    return build


def _act_order(rows: int, columns: int, generator: torch.Generator) -> ScaledMatrix:
    matrix = _words(4, 32, zeros=True, across=True)(rows, columns, generator)
    index = torch.randint(0, matrix.scales.shape[1], (columns,), generator=generator)
    return replace(matrix, group_index=index.int(), input_scale=torch.rand(columns, generator=generator) + 0.5)


FORMS: Mapping[str, Build] = {
    "GPTQ 4": _words(4, 128, zeros=True, across=True),
    "GPTQ 4, activation order": _act_order,
    "GPTQ 8": _words(8, 64, zeros=False, across=True),
    "int4, groups of 32": _words(4, 32, zeros=False),
    "int2": _words(2, 64, zeros=True),
    "AWQ": _awq,
    "FP8 per tensor": _fp8((1 << 20, 1 << 20)),
    "FP8 per channel": _fp8((1, 1 << 20)),
    "FP8 blocks": _fp8((128, 128)),
    "MXFP8": _fp8((1, 32)),
    "int8": _int8,
    "MXFP4": _float4(32),
    "NVFP4": _float4(16),
}


def _codes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).int()


def _bytes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def scaled_cases(case: Callable[[str, str, Callable[[Source], tuple[Any, ...]]], Any]) -> Iterator[Any]:
    """Products, as `cases.Case`."""
    for name in FORMS:
        yield case("scaled_linear", f"{name}, one token of 544", _product(name, (1,), 24, 544))
        yield case("scaled_linear", f"{name}, tokens of 96", _product(name, (5,), 16, 96))
    yield case("scaled_linear", "many tokens and rows", _product("FP8 blocks", (2, 35), 136, 160))
    yield case("scaled_linear", "no tokens", _product("AWQ", (0,), 8, 128))


def _product(name: str, lead: tuple[int, ...], rows: int, columns: int) -> Callable[[Source], tuple[Any, ...]]:
    def make(s: Source) -> tuple[Any, ...]:
        matrix = as_rows(FORMS[name](rows, columns, s.generator).to(s.device))
        return s.strided(*lead, columns), matrix, s.normal(rows)

    return make


def scaled_works(work: type[Work], s: Sizes, device: torch.device) -> Iterator[Work]:
    """Products of one token, of eight and of a prompt."""
    columns, rows = -(-s.hidden // 256) * 256, s.intermediate
    for name in ("AWQ", "FP8 blocks", "NVFP4"):
        weight_bytes = FORMS[name](rows, columns, torch.Generator()).nbytes
        for tokens in (1, 8, s.num_tokens):
            label = f"{name}, {tokens} x {columns} to {rows}"
            make = _timed(name, tokens, rows, columns, device)
            if tokens <= 8 and tokens != s.num_tokens:
                yield work("scaled_linear", label, make, weight_bytes + 2 * tokens * (rows + columns))
            else:
                yield work("scaled_linear", label, make, num_flop=2 * tokens * rows * columns)


def _timed(name: str, tokens: int, rows: int, columns: int, device: torch.device) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        matrix = as_rows(FORMS[name](rows, columns, torch.Generator()).to(device))
        return torch.randn(tokens, columns, device=device).bfloat16(), matrix, None

    return make
