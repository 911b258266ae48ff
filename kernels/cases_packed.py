"""Products with packed weights: the calls on which they are judged, and those that are timed.

Every format in planes, odd numbers of rows, columns that fill no whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkit.kernels.block_formats import BLOCK_FORMATS, PLANE_FORMATS, PLANE_SUFFIX, PLANES
from vkit.kernels.cases_scaled import FORMS
from vkit.kernels.experts import ExpertMatrix
from vkit.kernels.planes import as_rows, to_planes

if TYPE_CHECKING:
    from vkit.kernels.cases import Source
    from vkit.kernels.speeds import Sizes, Work

HALVES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
"""Where a block keeps its half-precision numbers."""
SMALL = 0.02
"""Scales are below this, so that values are near those of a trained weight."""


def packed_rows(qtype: str, num_rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random blocks with small finite scales, uint8 (rows, row_bytes)."""
    block = BLOCK_FORMATS[qtype]
    data = torch.randint(0, 256, (num_rows, block.row_bytes(columns)), dtype=torch.uint8, generator=generator)
    blocks = data.view(num_rows, -1, block.num_bytes)
    for at in HALVES.get(qtype, ()):
        scales = torch.rand(*blocks.shape[:2], 1, generator=generator) * SCALES.get(qtype, SMALL)
        blocks[..., at : at + 2] = scales.half().view(torch.uint8)
    if qtype == "MXFP4":
        blocks[..., 0] = blocks[..., 0] % 8 + 117
    if qtype == "NVFP4":
        blocks[..., :4] = blocks[..., :4] % 40 + 1
    return data


SCALES = {"Q8_0": 1e-3, "IQ4_NL": 1e-3, **dict.fromkeys(("Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q2_K", "Q3_K"), 3e-4)}
"""Below what the scales are, for formats with large codes or scales of scales."""


def packed_cases(case: Callable[[str, str, Callable[[Source], tuple[Any, ...]]], Any]) -> Iterator[Any]:
    """Products and look-ups, as `cases.Case`."""
    for qtype in PLANES:
        size = BLOCK_FORMATS[qtype].num_elements
        yield case("quantized_linear", f"{qtype}, one token of 768", _product(qtype, (1,), 9, 768))
        yield case("quantized_linear", f"{qtype}, tokens of {2 * size}", _product(qtype, (5,), 11, 2 * size))
        yield case("quantized_embedding", f"{qtype}, 3 of 7", _rows(qtype, 7, 5 * size))
    yield case("quantized_linear", "many tokens and rows", _product("Q4_K", (70,), 70, 512))
    yield case("quantized_linear", "a block", _product("Q8_0", (1,), 1, 32))
    yield case("quantized_linear", "no tokens", _product("Q8_0", (0,), 5, 64))
    yield case("quantized_linear", "strided tokens and rows, two leading dimensions", _strided)


def expert_cases(case: Callable[[str, str, Callable[[Source], tuple[Any, ...]]], Any]) -> Iterator[Any]:
    """Mixtures of packed experts, as `cases.Case`: tokens, choices, experts; width, hidden; parts of gate and up."""
    for name, shape, sizes, parts in (
        ("Q8_0", (1, 2, 4), (64, 32), 1),
        ("Q4_1", (5, 3, 4), (96, 64), 2),
        ("Q4_K", (3, 1, 2), (256, 256), 1),
        ("GPTQ 4", (5, 3, 4), (128, 64), 2),
        ("FP8 blocks", (20, 1, 1), (72, 136), 1),
        ("NVFP4", (3, 2, 4), (64, 32), 2),
    ):
        label = f"{name}, {shape} of {sizes}, {parts} parts"
        yield case("run_experts", label, _experts(name, shape, sizes, parts))


def _experts(
    name: str, shape: tuple[int, int, int], sizes: tuple[int, int], parts: int
) -> Callable[[Source], tuple[Any, ...]]:
    (tokens, top_k, experts), (width, hidden) = shape, sizes

    def make(s: Source) -> tuple[Any, ...]:
        ids = torch.stack([torch.randperm(experts, generator=s.generator)[:top_k] for _ in range(tokens)])
        weights = torch.rand(tokens, top_k, generator=s.generator).to(s.device)
        gate_up = [
            expert_matrix(name, experts, 2 * hidden // parts, width, s.device, s.generator) for _ in range(parts)
        ]
        down = expert_matrix(name, experts, width, hidden, s.device, s.generator)
        return s.normal(tokens, width), weights, ids.to(s.device), gate_up, down, "silu"

    return make


def expert_matrix(
    name: str, experts: int, rows: int, columns: int, device: torch.device, generator: torch.Generator
) -> ExpertMatrix:
    """Experts stored in the format of this name, whose products are scaled each by a number of its own."""
    if name in FORMS:
        matrices = [as_rows(FORMS[name](rows, columns, generator).to(device)) for _ in range(experts)]
        return ExpertMatrix(tuple(matrices))
    scales = torch.rand(experts, generator=generator).to(device) * 0.1
    data = [to_planes(packed_rows(name, rows, columns, generator), name).to(device) for _ in range(experts)]
    return ExpertMatrix(tuple(data), name + PLANE_SUFFIX, scales)


def _product(qtype: str, lead: tuple[int, ...], rows: int, columns: int) -> Callable[[Source], tuple[Any, ...]]:
    def make(s: Source) -> tuple[Any, ...]:
        data = to_planes(packed_rows(qtype, rows, columns, s.generator), qtype).to(s.device)
        bias = s.normal(rows) if rows % 2 else None
        return s.strided(*lead, columns), data, qtype + PLANE_SUFFIX, bias

    return make


def _strided(s: Source) -> tuple[Any, ...]:
    data = to_planes(packed_rows("Q5_1", 18, 96, s.generator), "Q5_1").to(s.device)
    return s.strided(2, 3, 96), data[::2], "Q5_1" + PLANE_SUFFIX, None


def _rows(qtype: str, num_rows: int, columns: int) -> Callable[[Source], tuple[Any, ...]]:
    def make(s: Source) -> tuple[Any, ...]:
        data = to_planes(packed_rows(qtype, num_rows, columns, s.generator), qtype).to(s.device)
        return s.integers(num_rows - 1, 0, 3), data, qtype + PLANE_SUFFIX

    return make


def packed_works(work: type[Work], s: Sizes, device: torch.device) -> Iterator[Work]:
    """Products of one token, of eight and of a prompt, and the look-up of a prompt."""
    columns, rows = -(-s.hidden // 256) * 256, s.intermediate
    for qtype in ("Q8_0", "Q4_K", "Q6_K"):
        weight_bytes = rows * PLANE_FORMATS[qtype + PLANE_SUFFIX].row_bytes(columns)
        for tokens in (1, 8, s.num_tokens):
            label = f"{qtype}, {tokens} x {columns} to {rows}"
            make = _timed(qtype, tokens, rows, columns, device)
            if tokens <= 8 and tokens != s.num_tokens:
                yield work("quantized_linear", label, make, weight_bytes + 2 * tokens * (rows + columns))
            else:
                yield work("quantized_linear", label, make, num_flop=2 * tokens * rows * columns)
    yield _timed_rows(work, s.num_tokens, rows, columns, device)
    yield _timed_experts(work, s, columns, device)


def _timed(qtype: str, tokens: int, rows: int, columns: int, device: torch.device) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        data = to_planes(packed_rows(qtype, rows, columns, torch.Generator()), qtype).to(device)
        return torch.randn(tokens, columns, device=device).bfloat16(), data, qtype + PLANE_SUFFIX, None

    return make


def _timed_experts(work: type[Work], s: Sizes, columns: int, device: torch.device) -> Work:
    """One token of a mixture: the bytes of the experts it chose."""
    experts, top_k, width = 8, 2, -(-s.intermediate // 128) * 32

    def make() -> tuple[Any, ...]:
        generator = torch.Generator()
        gate_up = expert_matrix("Q4_0", experts, 2 * width, columns, device, generator)
        down = expert_matrix("Q4_0", experts, columns, width, device, generator)
        x, weights = torch.randn(1, columns, device=device).bfloat16(), torch.rand(1, top_k, device=device)
        ids = torch.tensor([[1, 6]], device=device)
        return x, weights, ids, [gate_up], down, "silu"

    num_bytes = top_k * 3 * width * columns // 32 * PLANE_FORMATS["Q4_0" + PLANE_SUFFIX].num_bytes
    label = f"Q4_0, 1 token, {top_k} of {experts} experts of {columns} x {width}"
    return work("run_experts", label, make, num_bytes + 4 * columns)


def _timed_rows(work: type[Work], tokens: int, rows: int, columns: int, device: torch.device) -> Work:
    def make() -> tuple[Any, ...]:
        data = to_planes(packed_rows("Q6_K", rows, columns, torch.Generator()), "Q6_K").to(device)
        return torch.randint(0, rows, (tokens,), device=device), data, "Q6_K" + PLANE_SUFFIX

    row_bytes = PLANE_FORMATS["Q6_K" + PLANE_SUFFIX].row_bytes(columns)
    label = f"Q6_K, {tokens} rows of {columns}"
    return work("quantized_embedding", label, make, tokens * (row_bytes + 4 * columns))
