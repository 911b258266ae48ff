"""Narrow KV caches: what rows become, in plain torch and natively, and attention over them against dequantised keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vkit.kernels.cpu.ops import Operations
from vkit.kernels.paged import PagedBatch
from vkit.kernels.reference import OPS
from vkit.kernels.reference.narrow_cache import decode_rows, encode_rows

NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def same_bytes(got: Tensor, expected: Tensor) -> bool:
    return torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def caches(num_blocks: int, size: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Empty caches with the widths of this dtype."""
    behind = 4 if dtype is torch.int8 else 0
    shapes = [(num_blocks, size, heads, dim + behind) for dim in dims]
    return tuple(torch.zeros(shape, dtype=torch.uint8).view(dtype) for shape in shapes)  # type: ignore[return-value]


def test_int8_rows_have_a_scale_each() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5, 254.0], [0.0, 0.0, 0.0, 0.0], [1e-3, -1e-3, 0.0, 5e-4]])
    rows = encode_rows(x, torch.int8)
    assert rows.shape == (3, 8)
    scales = rows[:, 4:].contiguous().view(torch.float32).flatten()
    torch.testing.assert_close(scales, torch.tensor([2.0, 0.0, 1e-3 / 127]))
    assert rows[0, :4].tolist() == [0, -1, 0, 127]  # ties go to even
    assert rows[2, :4].tolist() == [127, -127, 0, 64]
    error = (decode_rows(rows, torch.float32) - x).abs()
    assert bool((error <= scales[:, None] / 2 + 1e-9).all())


@pytest.mark.parametrize("dtype", NARROW[:2])
def test_fp8_rows_saturate(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    rows = encode_rows(torch.tensor([1e9, -1e9, math.inf, -math.inf, largest * 1.01, math.nan]), dtype).float()
    assert rows[:5].tolist() == [largest, -largest, largest, -largest, largest]
    assert rows[5].isnan()


@pytest.mark.parametrize("cache_dtype", NARROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(16, 16), (18, 20), (64, 80)])
def test_rows_are_written_as_the_reference_writes_them(
    cache_dtype: torch.dtype, dtype: torch.dtype, dims: tuple[int, int], level: str, operations: Operations
) -> None:
    k = (torch.randn(40, 2, dims[0]) * torch.logspace(-4, 3, 40)[:, None, None]).to(dtype)
    v = torch.randn(40, 2, dims[1]).to(dtype)
    k[0], k[1, 0, 0], v[2] = 0.0, 1e4, 1e-7
    slots = torch.randperm(64)[:40]
    slots[7] = -1
    got, expected = caches(4, 16, 2, dims, cache_dtype), caches(4, 16, 2, dims, cache_dtype)
    operations.write_kv(k, v, *got, slots)
    OPS["write_kv"](k, v, *expected, slots)
    for one, other in zip(got, expected, strict=True):
        assert same_bytes(one, other)


@pytest.mark.parametrize("cache_dtype", NARROW[:2])
def test_every_fp8_number_and_every_tie(cache_dtype: torch.dtype, level: str, operations: Operations) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(cache_dtype).float()
    numbers = codes[codes.isfinite()].sort().values.unique()
    values = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, torch.nextafter(numbers, torch.tensor(math.inf))])
    values = torch.nn.functional.pad(values, (0, -len(values) % 16)).view(-1, 1, 16)
    size = values.shape[0]
    got, expected = caches(1, size, 1, (16, 16), cache_dtype), caches(1, size, 1, (16, 16), cache_dtype)
    slots = torch.arange(size)
    operations.write_kv(values, values, *got, slots)
    OPS["write_kv"](values, values, *expected, slots)
    assert same_bytes(got[0], expected[0])


@pytest.mark.parametrize("cache_dtype", NARROW)
@pytest.mark.parametrize(("heads", "kv_heads", "dims"), [(6, 2, (16, 16)), (5, 1, (24, 40)), (3, 3, (80, 80))])
def test_attention_over_a_narrow_cache(
    cache_dtype: torch.dtype, heads: int, kv_heads: int, dims: tuple[int, int], level: str, operations: Operations
) -> None:
    """Judged by attention over the same keys and values written out in float32."""
    lengths, queries, size = [600, 90, 2, 37], [1, 70, 1, 5], 16
    blocks = [list(range(start, start + -(-n // size))) for n, start in zip(lengths, (1, 40, 60, 70), strict=True)]
    table = torch.zeros((4, 40), dtype=torch.int32)
    for row, own in zip(table, blocks, strict=True):
        row[: len(own)] = torch.tensor(own, dtype=torch.int32)
    cu = [0, *torch.tensor(queries).cumsum(0).tolist()]
    batch = PagedBatch(
        table,
        torch.arange(4, dtype=torch.int32),
        torch.zeros(cu[-1], dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(cu, dtype=torch.int32),
        [0, 1, 2, 3],
        lengths,
        cu,
    )
    narrow = caches(80, size, kv_heads, dims, cache_dtype)
    k, v = torch.randn(80 * size, kv_heads, dims[0]), torch.randn(80 * size, kv_heads, dims[1])
    OPS["write_kv"](k, v, *narrow, torch.arange(80 * size))
    wide = [decode_rows(part, torch.float32) for part in narrow]
    q, sinks = torch.randn(cu[-1], heads, dims[0]), torch.randn(heads)
    for window, cap, sink in ((None, None, None), (9, None, None), (100, 5.0, sinks)):
        expected = OPS["paged_attention"](q, *wide, batch, dims[0] ** -0.5, window, cap, sink)
        for implementation in (operations.paged_attention, OPS["paged_attention"]):
            got = implementation(q, *narrow, batch, dims[0] ** -0.5, window, cap, sink)
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
