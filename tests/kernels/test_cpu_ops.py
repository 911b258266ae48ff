"""Native norms, activations, rotary embedding and attention against the plain torch reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vkit.kernels.cpu.cache import kv_layout
from vkit.kernels.cpu.library import Library
from vkit.kernels.cpu.ops import Operations
from vkit.kernels.paged import PagedBatch
from vkit.kernels.reference import OPS

TOLERANCE = {
    torch.float32: {"atol": 3e-6, "rtol": 3e-6},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}
DTYPES = list(TOLERANCE)
WIDTHS = [1, 7, 16, 100, 256]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected, **TOLERANCE[expected.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(dtype: torch.dtype, width: int, level: str, operations: Operations) -> None:
    for lead in ((0,), (1,), (3, 5)):
        x = torch.randn(*lead, width + 3)[..., :width].to(dtype)
        residual, weight = torch.randn(*lead, width).to(dtype), torch.randn(width).to(dtype)
        bias = torch.randn(width).to(dtype)
        for offset in (0.0, 1.0):
            close(operations.rms_norm(x, weight, 1e-6, offset), OPS["rms_norm"](x, weight, 1e-6, offset))
            got = operations.add_rms_norm(x, residual, weight, 1e-6, offset)
            for one, two in zip(got, OPS["add_rms_norm"](x, residual, weight, 1e-6, offset), strict=True):
                close(one, two)
        close(operations.rms_norm(x, None, 1e-6), OPS["rms_norm"](x, None, 1e-6))
        close(operations.layer_norm(x, weight, bias, 1e-5), OPS["layer_norm"](x, weight, bias, 1e-5))
        close(operations.layer_norm(x, None, None, 1e-5), OPS["layer_norm"](x, None, None, 1e-5))
    heads, weights = torch.randn(4, 3, width).to(dtype), torch.randn(3, width).to(dtype)
    close(operations.layer_norm(heads, weights, None, 1e-5), OPS["layer_norm"](heads, weights, None, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_elementwise(dtype: torch.dtype, width: int, level: str, operations: Operations) -> None:
    x, y = (torch.randn(5, width) * 6).to(dtype), torch.randn(5, width).to(dtype)
    for kind in ("gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "silu", "tanh"):
        close(operations.unary(x, kind), OPS["unary"](x, kind))
    gates = torch.cat([x, y], -1)
    close(operations.silu_and_mul(gates), OPS["silu_and_mul"](gates))
    for approximate in ("tanh", "none"):
        close(operations.gelu_and_mul(gates, approximate), OPS["gelu_and_mul"](gates, approximate))
    close(operations.add(x, y), x + y)
    close(operations.add(x, y[0]), x + y[0])
    close(operations.multiply(x, y), x * y)
    close(operations.multiply(x, y[0]), x * y[0])
    close(operations.scale(x, 0.3), OPS["scale"](x, 0.3))
    close(operations.soft_cap(x, 2.5), OPS["soft_cap"](x, 2.5))
    assert torch.equal(operations.concat([x, y, x[:, :1]]), torch.cat([x, y, x[:, :1]], -1))


def test_activations_at_the_ends(level: str, operations: Operations) -> None:
    x = torch.tensor([[-1e4, -100.0, -88.0, -1e-3, 0.0, 1e-3, 0.124, 0.126, 88.0, 100.0, 1e4]])
    for kind in ("gelu", "gelu_tanh", "sigmoid", "silu", "tanh"):
        close(operations.unary(x, kind), OPS["unary"](x, kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotated"), [(16, 16), (80, 32), (10, 6)])
def test_rope(
    dtype: torch.dtype, interleaved: bool, head_dim: int, rotated: int, level: str, operations: Operations
) -> None:
    wide = torch.randn(7, (5 + 2) * head_dim).to(dtype)
    positions = torch.randint(0, 50, (7,))
    cos_sin = torch.randn(50, rotated)
    weights = [torch.randn(head_dim).to(dtype) for _ in range(2)]

    def views(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, : 5 * head_dim].view(7, 5, head_dim), x[:, 5 * head_dim :].view(7, 2, head_dim)

    got, expected = wide.clone(), wide.clone()
    operations.rope(*views(got), positions, cos_sin, interleaved)
    OPS["rope"](*views(expected), positions, cos_sin, interleaved)
    close(got, expected)
    for offset in (0.0, 1.0):
        operations.qk_norm_rope(*views(got), *weights, 1e-6, offset, positions.int(), cos_sin, interleaved)
        OPS["qk_norm_rope"](*views(expected), *weights, 1e-6, offset, positions.int(), cos_sin, interleaved)
        close(got, expected)


def paged_batch(queries: list[int], lengths: list[int], block_size: int, num_blocks: int) -> PagedBatch:
    """Sequences whose blocks lie anywhere; table rows in an order of their own."""
    columns = max(-(-length // block_size) for length in lengths) + 1
    count = len(lengths)
    table = torch.full((count + 2, columns), -(1 << 20), dtype=torch.int32)
    rows = torch.randperm(count + 2)[:count].int()
    free = torch.randperm(num_blocks - 1).add(1).tolist()
    slots: list[int] = []
    for b, (num_queries, length) in enumerate(zip(queries, lengths, strict=True)):
        blocks = [free.pop() for _ in range(-(-length // block_size))]
        table[rows[b], : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        slots += [blocks[at // block_size] * block_size + at % block_size for at in range(length - num_queries, length)]
    cu = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    return PagedBatch(table, rows, torch.tensor(slots), lens, cu, rows.tolist(), lengths, cu.tolist())


def caches(
    num_blocks: int, block_size: int, heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V side by side in each page, as the store has them."""
    page = torch.randn(num_blocks, block_size * heads * sum(dims)).to(dtype)
    split = block_size * heads * dims[0]
    k, v = page[:, :split], page[:, split:]
    return k.unflatten(1, (block_size, heads, dims[0])), v.unflatten(1, (block_size, heads, dims[1]))


CASES = {
    "decode": ([1, 1, 1], [1, 17, 300]),
    "long decode": ([1, 1], [1300, 5]),
    "verify": ([4, 1], [700, 9]),
    "prefill": ([33], [33]),
    "chunk": ([40, 7], [200, 7]),
    "mixed": ([1, 70, 1, 5], [600, 90, 2, 600]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dims", "block_size"), [(6, 2, (16, 16), 16), (5, 1, (24, 40), 4), (3, 3, (80, 80), 7)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(
    case: str,
    heads: int,
    kv_heads: int,
    dims: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    level: str,
    operations: Operations,
) -> None:
    queries, lengths = CASES[case]
    num_blocks = sum(-(-length // block_size) for length in lengths) + 5
    batch = paged_batch(queries, lengths, block_size, num_blocks)
    k_cache, v_cache = caches(num_blocks, block_size, kv_heads, dims, dtype)
    tokens = sum(queries)
    q, sinks = torch.randn(tokens, heads, dims[0]), torch.randn(heads)
    scale = dims[0] ** -0.5
    for window, cap, sink in (
        (None, None, None),
        (9, None, None),
        (100, 5.0, sinks),
        (None, None, sinks),
        (None, 3.0, None),
    ):
        got = operations.paged_attention(q, k_cache, v_cache, batch, scale, window, cap, sink)
        expected = OPS["paged_attention"](q, k_cache, v_cache, batch, scale, window, cap, sink)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def tiled(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same cache in the layout of kv_layout, between guard bytes; written by hand, element by element of a tile."""
    (num_blocks, size, heads, dim), value_dim = k.shape, v.shape[3]
    pages = torch.full((num_blocks, (k[0].numel() + v[0].numel()) * k.element_size() + 64), 255, dtype=torch.uint8)
    tiled_k, tiled_v = kv_layout(pages, size, heads, (dim, value_dim), k.dtype)
    by_head_k, by_head_v = k.transpose(1, 2), v.transpose(1, 2)
    if k.dtype is torch.float32:
        tiled_k.copy_(by_head_k.unflatten(2, (size // 16, 16)).transpose(3, 4))
        tiled_v.copy_(by_head_v)
    else:
        tiled_k.copy_(by_head_k.reshape(num_blocks, heads, size // 16, 16, dim // 2, 2).transpose(3, 4))
        tiled_v.copy_(by_head_v.reshape(num_blocks, heads, size // 2, 2, value_dim).transpose(3, 4))
    return tiled_k, tiled_v


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dims", "block_size"), [(6, 2, (16, 16), 16), (5, 1, (24, 40), 32), (20, 2, (80, 80), 16)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiled_attention(
    case: str,
    heads: int,
    kv_heads: int,
    dims: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    level: str,
    operations: Operations,
) -> None:
    queries, lengths = CASES[case]
    num_blocks = sum(-(-length // block_size) for length in lengths) + 5
    batch = paged_batch(queries, lengths, block_size, num_blocks)
    k_cache, v_cache = caches(num_blocks, block_size, kv_heads, dims, dtype)
    tiles = tiled(k_cache, v_cache)
    assert [x.ndim for x in tiles] == ([6, 5] if dtype is torch.bfloat16 else [5, 4])
    q, sinks = torch.randn(sum(queries), heads, dims[0]), torch.randn(heads)
    # The dot product of bfloat16 rounds queries and weights to 8 bits.
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    for window, cap, sink in ((None, None, None), (9, None, None), (100, 5.0, sinks), (600, None, sinks)):
        got = operations.paged_attention(q, *tiles, batch, dims[0] ** -0.5, window, cap, sink)
        expected = OPS["paged_attention"](q, k_cache, v_cache, batch, dims[0] ** -0.5, window, cap, sink)
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_tiled_write_kv(dtype: torch.dtype, cache_dtype: torch.dtype, level: str, operations: Operations) -> None:
    plain = caches(4, 32, 2, (18, 20), cache_dtype)
    tiles = tiled(*plain)
    k, v = torch.randn(6, 2, 18).to(dtype), torch.randn(6, 2, 20).to(dtype)
    slots = torch.tensor([3, 127, -1, 64, 33, 18])
    operations.write_kv(k, v, *tiles, slots)
    OPS["write_kv"](k, v, *plain, slots)
    for got, expected in zip(tiles, tiled(*plain), strict=True):
        assert torch.equal(got, expected)


def test_a_tiled_cache_never_meets_the_reference(operations: Operations) -> None:
    tiles = tiled(*caches(4, 32, 2, (16, 16), torch.float32))
    x = torch.randn(3, 16, 2).transpose(1, 2)
    with pytest.raises(ValueError, match="write_kv: k "):
        operations.write_kv(x, x, *tiles, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="paged_attention: q "):
        operations.paged_attention(x, *tiles, paged_batch([3], [3], 32, 4), 1.0)


@pytest.mark.parametrize(
    ("block_size", "dims", "dtype"),
    [(8, (16, 16), torch.float32), (16, (16, 16), torch.float16), (16, (15, 16), torch.bfloat16)],
)
def test_what_cannot_be_tiled_is_plain(block_size: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    pages = torch.zeros(3, block_size * 2 * sum(dims) * dtype.itemsize, dtype=torch.uint8)
    k, v = kv_layout(pages, block_size, 2, dims, dtype)
    assert k.shape == (3, block_size, 2, dims[0])
    assert v.shape == (3, block_size, 2, dims[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_write_kv(dtype: torch.dtype, cache_dtype: torch.dtype, level: str, operations: Operations) -> None:
    k_cache, v_cache = caches(6, 4, 2, (16, 20), cache_dtype)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    wide = torch.randn(5, 2 * 36 + 3).to(dtype)
    k, v = wide[:, :32].view(5, 2, 16), wide[:, 32:72].view(5, 2, 20)
    slots = torch.tensor([3, 22, -1, 8, 9])
    operations.write_kv(k, v, k_cache, v_cache, slots)
    OPS["write_kv"](k, v, expected_k, expected_v, slots)
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_attention_does_not_depend_on_threads_or_batch_mates(library: Library, operations: Operations) -> None:
    queries, lengths = CASES["mixed"]
    batch = paged_batch(queries, lengths, 16, 120)
    k_cache, v_cache = caches(120, 16, 2, (64, 64), torch.float32)
    q = torch.randn(sum(queries), 6, 64)
    before = library.num_threads
    outs = []
    for count in (1, 2, 5):
        library.set_num_threads(count)
        outs.append(operations.paged_attention(q, k_cache, v_cache, batch, 0.125))
    library.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)
    alone = PagedBatch(
        batch.block_table,
        batch.rows[:1],
        batch.slot_mapping[:1],
        batch.seq_lens[:1],
        batch.cu_seqlens[:2],
        batch.host_rows[:1],
        batch.host_seq_lens[:1],
        batch.host_cu_seqlens[:2],
    )
    assert torch.equal(operations.paged_attention(q[:1], k_cache, v_cache, alone, 0.125), outs[0][:1])


def test_masked_rubbish_does_not_leak(level: str, operations: Operations) -> None:
    """Slots past a sequence's end, and blocks before its window, may hold NaN."""
    for dtype, is_tiled in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True)):
        batch = paged_batch([1, 3], [21, 10], 16, 8)
        k_cache, v_cache = caches(8, 16, 1, (16, 16), dtype)
        for b, length in enumerate((21, 10)):
            last = batch.block_table[batch.rows[b], (length - 1) // 16]
            k_cache[last, length % 16 :] = math.nan
            v_cache[last, length % 16 :] = math.nan
        q = torch.randn(4, 2, 16)
        cache = tiled(k_cache, v_cache) if is_tiled else (k_cache, v_cache)
        assert operations.paged_attention(q, *cache, batch, 0.25).isfinite().all()
        first = batch.block_table[batch.rows[0], 0]
        k_cache[first], v_cache[first] = math.nan, math.nan
        cache = tiled(k_cache, v_cache) if is_tiled else (k_cache, v_cache)
        assert operations.paged_attention(q, *cache, batch, 0.25, window=5)[:1].isfinite().all()
